"""Graphs of nodes with choices that grow, and their historical marks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.evolution.marked import MarkedGraphs
from orchestray.search.spaces.architectures.modules import Modules


def graphs(of: str = "layers") -> MarkedGraphs:
    space = Modules(max_nodes=5, max_layers=5)
    return MarkedGraphs(space.layers, "layers") if of == "layers" else MarkedGraphs(space.blueprints, "nodes")


def grown(made: MarkedGraphs, rng: np.random.Generator, mutations: int) -> Any:
    genome = made.sample(rng)
    for _ in range(mutations):
        genome = made.mutate(genome, rng)
    return genome


@pytest.mark.parametrize("of", ["layers", "nodes"])
def test_graphs_begin_with_one_node_and_grow_to_the_most_there_may_be_each_of_them_valid(of: str) -> None:
    made, rng = graphs(of), np.random.default_rng(0)
    for _ in range(10):
        genome = made.sample(rng)
        assert (len(genome["nodes"]), genome["connections"]) == (1, [])
        for _ in range(60):
            mutant = made.mutate(genome, rng)
            assert mutant != genome
            assert 0 <= len(mutant["nodes"]) - len(genome["nodes"]) <= 1
            assert {gene[0] for gene in genome["connections"]} <= {gene[0] for gene in mutant["connections"]}
            genome = json.loads(json.dumps(mutant))
            choices = made.choices_of(genome)
            assert made.parts.genome_of(made.parts.decisions_of(choices)) == choices
            assert choices[made.count] == len(genome["nodes"])
            drawn = sum(value for name, value in choices.items() if "-" in name)
            assert drawn == sum(gene[3] for gene in genome["connections"])
        assert len(genome["nodes"]) == 5


def test_equal_changes_have_equal_marks_in_any_graph_and_others_have_others() -> None:
    made = graphs()
    one, other = (made.sample(np.random.default_rng(seed)) for seed in (0, 1))
    by_place: dict[Any, set[int]] = {}
    for genome in (one, other):
        for seed in range(20):
            split = made.with_node(genome, np.random.default_rng(seed))
            (gene,) = split["connections"]
            by_place.setdefault("before" if gene[2] == 0 else "after", set()).add(split["nodes"][1][0])
    before, after = by_place["before"], by_place["after"]
    assert len(before) == len(after) == 1
    assert before != after


def test_a_split_connection_is_replaced_by_two_through_the_new_node() -> None:
    made, rng = graphs(), np.random.default_rng(0)
    for _ in range(50):
        genome = grown(made, rng, 6)
        split = made.with_node(genome, rng)
        if split == genome:
            continue
        (new,) = {number for number, _ in split["nodes"]} - {number for number, _ in genome["nodes"]}
        gone = [g for g, h in zip(genome["connections"], split["connections"], strict=False) if g[3] and not h[3]]
        added = {(gene[1], gene[2]) for gene in split["connections"]} - {(g[1], g[2]) for g in genome["connections"]}
        if gone:
            assert added == {(gone[0][1], new), (new, gone[0][2])}
        else:
            assert len(added) == 1
            assert new in next(iter(added))


def test_crossover_aligns_nodes_by_their_marks_and_has_the_structure_of_the_fitter() -> None:
    made, rng = graphs(), np.random.default_rng(0)
    mixed = 0
    for _ in range(60):
        a, b = grown(made, rng, 12), grown(made, rng, 12)
        child = made.crossover(a, b, rng)
        assert [number for number, _ in child["nodes"]] == [number for number, _ in a["nodes"]]
        assert [gene[:3] for gene in child["connections"]] == [gene[:3] for gene in a["connections"]]
        of_b = dict(b["nodes"])
        for (number, chosen), (_, of_child) in zip(a["nodes"], child["nodes"], strict=True):
            other = of_b.get(number, chosen)
            assert all(of_child[name] in (chosen[name], other[name]) for name in chosen)
            mixed += of_child not in (chosen, other)
        made.choices_of(child)  # raises if there were a cycle
    assert mixed > 10, "each choice comes from either by itself"


def test_distance_grows_with_what_only_one_has_and_with_other_choices() -> None:
    made, rng = graphs(), np.random.default_rng(0)
    one = made.sample(rng)
    other = made.with_choice(one, rng)
    assert made.distance(one, one) == 0
    assert made.distance(one, other) == made.distance(other, one) == 1 / 4
    longer = made.with_node(one, rng)
    assert made.distance(one, longer) == made.distance(longer, one) == (1 + 1) / (2 + 1)
    a, b = grown(made, rng, 20), grown(made, rng, 20)
    assert made.distance(a, b) == pytest.approx(made.distance(b, a))

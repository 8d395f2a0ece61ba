"""Rules for every genome of every space, however it came about."""

from __future__ import annotations

import json
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import BuiltInSpace, Genome
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.choices import ComposedSpace
from orchestray.search.spaces.registry import SPACES as REGISTRY
from orchestray.search.spaces.registry import make_space
from support.spaces import ENUMERATED, GROWING, SPACES

SHAPES = ((64,), (7,), (1, 8, 8), (3, 5, 9), (6, 6))
"""Shapes of one sample: flat and square, flat and not, images, images without channels."""

SHAPES_OF = {"topology": ((6,), (2, 3), (1, 2, 3))}
"""Shapes for spaces that are made for inputs of one size."""

ALL = {**SPACES, **GROWING}
MADE_ALL = {name: cast(BuiltInSpace, make_space(space, **arguments)) for name, (space, arguments) in ALL.items()}
MADE = {name: cast(ComposedSpace, make_space(space, **arguments)) for name, (space, arguments) in SPACES.items()}


def grown(space: BuiltInSpace, seed: int) -> Genome:
    """Return a genome as evolution makes it: drawn, crossed and mutated some times."""
    rng = np.random.default_rng(seed)
    genome = space.sample(rng)
    for _ in range(int(rng.integers(4))):
        genome = space.mutate(space.crossover(genome, space.sample(rng), rng), rng)
    return genome


def test_every_space_that_comes_along_is_among_these() -> None:
    assert {space for space, _ in ALL.values()} == set(REGISTRY)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_every_genome_builds_and_runs_forward_and_backward(name: str, seed: int, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES_OF.get(name, SHAPES)))
    space = MADE_ALL[name]
    network = space.build(grown(space, seed), shape, 3)
    outputs = network(torch.randn(2, *shape))
    assert outputs.shape == (2, 3)
    outputs.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_every_genome_is_json_is_drawn_is_read_and_has_one_key(name: str, seed: int) -> None:
    space = MADE_ALL[name]
    genome = grown(space, seed)
    again = json.loads(json.dumps(genome))
    assert again == genome
    if name in MADE:
        assert MADE[name].genome_of(MADE[name].decisions_of(again)) == genome
    assert space.key(again) == space.key(genome)
    assert space.text(genome)
    graph = space.graph(genome)
    assert all(before < after for before, after in graph.edges)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    if name not in {"topology", "painted"}:  # networks of nodes may leave out an input
        used = {before for before, _ in graph.edges}
        assert used == set(range(len(graph.nodes) - 1)), "every step but the last is used by another"


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_what_happens_to_a_genome_depends_on_the_seed_alone(name: str, seed: int) -> None:
    assert grown(MADE_ALL[name], seed) == grown(MADE_ALL[name], seed)


@pytest.mark.parametrize("name", ALL)
def test_a_mutation_changes_the_genome_and_leaves_the_parent_alone(name: str) -> None:
    space = MADE_ALL[name]
    rng = np.random.default_rng(0)
    for _ in range(10):
        parent = space.sample(rng)
        before = json.dumps(parent)
        assert space.mutate(parent, rng) != parent
        assert json.dumps(parent) == before


@pytest.mark.parametrize("name", SPACES)
def test_what_both_parents_chose_a_child_has_chosen(name: str) -> None:
    space = MADE[name]
    rng = np.random.default_rng(0)
    for _ in range(10):
        a, b = space.sample(rng), space.sample(rng)
        of_a, of_b = space.chosen_in(a), space.chosen_in(b)
        of_child = space.chosen_in(space.crossover(a, b, rng))
        for choice in of_child.keys() & of_a.keys() & of_b.keys():
            if of_a[choice] == of_b[choice]:
                assert of_child[choice] == of_a[choice]


@pytest.mark.parametrize("name", ENUMERATED)
def test_the_count_is_that_of_the_enumerated_genomes_each_of_them_once(name: str) -> None:
    space, arguments = ENUMERATED[name]
    made = cast(ComposedSpace, make_space(space, **arguments))
    written = [json.dumps(genome, sort_keys=True) for genome in made.enumerate()]
    assert len(set(written)) == len(written) == made.count()


@pytest.mark.parametrize("name", ENUMERATED)
def test_drawing_comes_to_every_genome_of_a_small_space(name: str) -> None:
    space, arguments = ENUMERATED[name]
    made = cast(ComposedSpace, make_space(space, **arguments))
    wanted = {json.dumps(genome, sort_keys=True) for genome in made.enumerate()}
    rng = np.random.default_rng(0)
    found = {json.dumps(made.sample(rng), sort_keys=True) for _ in range(20 * len(wanted))}
    assert found <= wanted
    assert len(found) > 0.9 * len(wanted)


def test_a_chain_is_edited_as_a_list_of_layers() -> None:
    chain = MADE["chain with skips"]
    rng = np.random.default_rng(0)
    for _ in range(20):
        genome = chain.sample(rng)
        assert chain.genome_from(chain.layers_of(genome), genome.get("last", "average")) == genome  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"layer0\.kernel must be one of"):
        chain.genome_from([{"kind": "conv", "channels": 8, "kernel": 2, "stride": 1}])  # type: ignore[attr-defined]


def test_modules_that_a_blueprint_does_not_use_are_no_part_of_the_genome() -> None:
    space = MADE["modules"]
    rng = np.random.default_rng(0)
    for _ in range(20):
        blueprint = space.blueprints.sample(rng)  # type: ignore[attr-defined]
        modules = [space.layers.sample(rng) for _ in range(3)]  # type: ignore[attr-defined]
        genome = space.assemble(blueprint, modules)  # type: ignore[attr-defined]
        assert space.genome_of(space.decisions_of(genome)) == genome
        used = {value for name, value in blueprint.items() if name.endswith(".module")}
        assert {index for index, module in enumerate(genome["modules"]) if module is not None} == used


def test_a_choice_of_a_cell_is_changed_as_the_program_itself_would_change_it() -> None:
    class Run(Cell):
        makes_the_same_choices = False

    direct, run = Cell(nodes=3), Run(nodes=3)
    genome = other = direct.sample(np.random.default_rng(0))
    rng, same_rng = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(50):
        genome, other = direct.mutate(genome, rng), run.mutate(other, same_rng)
        assert list(genome.items()) == list(other.items())
    direct.mutate(genome, rng)
    genome["normal.0.left.operation"] = "no operation"
    with pytest.raises(ConfigError, match="no operation"):
        direct.mutate(genome, rng)


def test_a_cell_is_drawn_as_the_program_itself_would_draw_it() -> None:
    class Run(Cell):
        makes_the_same_choices = False

    direct, run = Cell(nodes=3), Run(nodes=3)
    rng, same_rng = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(50):
        assert list(direct.sample(rng).items()) == list(run.sample(same_rng).items())
        assert rng.random() == same_rng.random()

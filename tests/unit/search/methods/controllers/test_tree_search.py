"""The tree of answers is descended by confidence bounds, and none of its leaves is drawn twice."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.base import Finished, Method, Proposal
from orchestray.search.methods.controllers.tree_search import TreeSearch
from orchestray.search.methods.hyper.random import Random
from orchestray.search.methods.space import Space
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, Decision
from orchestray.search.spaces.dimensions import Choice, Dimension
from support.toy_choices import Cells, Layers, Toy, cell_score, layer_score


class Levels(Toy):
    """A space of one choice with many ordered options."""

    def compose(self, choose: Choose) -> None:
        choose("x", list(range(64)))


class Pair(Toy):
    """A space of two operations whose order does not matter: most networks are made by two ways of answering."""

    def compose(self, choose: Choose) -> None:
        for name in ("first", "second"):
            choose(name, ["max", "mean", "none"])

    def genome_of(self, decisions: Sequence[Decision]) -> Genome:
        return dict(zip(("first", "second"), sorted(one.value for one in decisions), strict=True))


def score(proposal: Proposal, _step: int) -> float:
    return layer_score(proposal.genome)


def score_one(_proposal: Proposal, _step: int) -> float:
    return 1.0


def test_a_choice_of_one_level_is_answered_by_ucb1() -> None:
    """Compare with the bandit of Auer, Cesa-Bianchi and Fischer (2002)."""
    arms, pulls = 4, {"arm": Choice(tuple(range(4))), "leaf": Choice(tuple(f"leaf {number}" for number in range(100)))}
    method, exploration = TreeSearch(space=pulls, exploration=0.7, seed=3), 0.7
    worth, counts, totals = [0.2, 0.9, 0.5, 0.0], [0] * arms, [0.0] * arms
    for pull in range(60):
        proposal = method.ask()
        assert proposal is not None
        arm = proposal.changes["arm"]
        if pull < arms:
            assert counts[arm] == 0, "each once before any twice"
        else:
            least, most = min(worth), max(worth)
            bounds = [
                (totals[one] / counts[one] - least) / (most - least)
                + exploration * math.sqrt(2 * math.log(pull) / counts[one])
                for one in range(arms)
            ]
            assert bounds[arm] == pytest.approx(max(bounds), rel=1e-12)
        counts[arm] += 1
        totals[arm] += worth[arm]
        method.tell(Finished(proposal.trial, "succeeded", 1, worth[arm]))
    assert counts[1] > 2 * counts[3]


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("bisection", [False, True])
def test_each_network_is_drawn_once_and_the_search_ends_when_all_have_been(workers: int, bisection: bool) -> None:
    space = Layers(2)
    result = simulate(TreeSearch(space={}, architecture=space, bisection=bisection), score, workers=workers)
    drawn = Counter(json.dumps(trial.proposal.genome) for trial in result.trials.values())
    assert len(drawn) == len(result.trials) == space.count()


def test_trials_that_run_at_once_go_different_ways() -> None:
    method = TreeSearch(space={}, architecture=Layers(3))
    asked = [method.ask() for _ in range(6)]
    assert Counter(one.genome["0.kind"] for one in asked if one is not None) == {"dense": 2, "pool": 2, "none": 2}


def test_the_tree_has_the_scores_of_what_was_drawn_below_each_node() -> None:
    method = TreeSearch(space={}, architecture=Layers(2), trials=15)
    result = simulate(method, score, workers=3)
    for option, kind in enumerate(["dense", "pool", "none"]):
        of_kind = [one for one in result.trials.values() if one.proposal.genome["0.kind"] == kind]
        node = method.root.moves[option]
        assert (node.visits, node.num_scores) == (len(of_kind), len(of_kind))
        assert node.total == pytest.approx(sum(one.score or 0.0 for one in of_kind), abs=1e-12)


def test_it_finds_better_networks_than_random_search_of_as_many_trials() -> None:
    space = Cells(4)

    def best(method: Method) -> float:
        return simulate(method, lambda proposal, _step: cell_score(proposal.genome)).best.score or 0.0

    given: dict[str, Any] = {"space": {}, "architecture": space, "trials": 150}
    found = [best(TreeSearch(**given, seed=seed)) for seed in range(9)]
    even = [best(Random(**given, seed=seed)) for seed in range(9)]
    assert np.mean(found) > np.mean(even) + 0.3


def test_halves_of_ordered_options_share_what_is_learned() -> None:
    def num_until_best(bisection: bool, seed: int) -> int:
        method = TreeSearch(space={}, architecture=Levels(), bisection=bisection, seed=seed)
        scores = simulate(method, lambda proposal, _step: -abs(proposal.genome["x"] - 45.0)).best_so_far()
        return scores.index(0.0) + 1

    halves, flat = ([num_until_best(bisection, seed) for seed in range(9)] for bisection in (True, False))
    assert np.mean(halves) < np.mean(flat) / 2


def test_a_trial_that_fails_before_any_has_a_score_counts_as_the_worst_once_there_is_one() -> None:
    method = TreeSearch(space={}, architecture=Layers(2))
    for trial in range(3):
        assert method.ask() is not None
        if trial < 2:
            method.tell(Finished(trial, "failed"))
            assert (method.root.visits, method.root.num_scores) == (trial + 1, 0)
    method.tell(Finished(2, "succeeded", 1, -3.0))
    assert (method.root.num_scores, method.root.total) == (3, -9.0)


def test_a_network_that_other_answers_make_too_is_proposed_once_and_its_score_counts_on_every_way_to_it() -> None:
    asked = [*iter(TreeSearch(space={}, architecture=Pair()).ask, None)]
    assert len(asked) == 6, "with all of them still being evaluated"
    method = TreeSearch(space={}, architecture=Pair())
    found = simulate(method, score_one)
    assert len(found.trials) == 6
    assert (method.root.visits, method.root.num_scores, method.root.total) == (9, 9, 9.0)


def test_answers_that_no_trial_can_have_are_not_proposed_and_the_search_ends_when_all_others_have_been() -> None:
    sides: dict[str, Dimension] = {key: Choice(tuple(range(4))) for key in "ab"}
    found = simulate(TreeSearch(space=Space(sides, is_refused=lambda values: values["a"] == values["b"])), score_one)
    points = Counter(tuple(trial.proposal.changes.values()) for trial in found.trials.values())
    assert points == Counter((a, b) for a in range(4) for b in range(4) if a != b)
    method = TreeSearch(space=Space(sides, is_refused=lambda values: True))
    assert method.ask() is None
    assert method.is_done


def test_the_first_draws_are_even() -> None:
    asked = [TreeSearch(space={}, architecture=Layers(1), seed=seed).ask() for seed in range(20)]
    assert {one.genome["0.kind"] for one in asked if one is not None} == {"dense", "pool", "none"}


def test_an_option_that_is_still_evaluated_is_taken_for_as_good_as_the_choice_whatever_the_sign_of_scores() -> None:
    arms = {"arm": Choice((0, 1, 2)), "leaf": Choice(tuple(range(100)))}
    method = TreeSearch(space=arms, exploration=0.0)
    asked = [method.ask() for _ in range(3)]
    for arm, worth in ((0, -5.0), (1, -1.0)):
        (trial,) = [one.trial for one in asked if one is not None and one.changes["arm"] == arm]
        method.tell(Finished(trial, "succeeded", 1, worth))
    later = [method.ask() for _ in range(5)]
    assert {one.changes["arm"] for one in later if one is not None} == {1}

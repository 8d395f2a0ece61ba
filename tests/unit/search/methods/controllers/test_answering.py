"""Searches that are answered choice by choice: which values are offered, and what is known of answers."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.controllers.answering import Evaluations
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform
from support.toy_choices import Layers

METHODS: dict[str, dict[str, Any]] = {
    "q_learning": {},
    "tree_search": {},
    "reinforce": {"children": 4},
    "progressive": {"beam": 4},
}
MANY = tuple(range(12))


def tried(method: str, dimension: Dimension, *, trials: int = 60, **others: Dimension) -> list[Any]:
    """Return the values of a key, which comes before the others, that a method tries, each once."""
    made = make_method(method, space={"x": dimension, **others}, trials=trials, **METHODS[method])

    def score(proposal: Proposal, _step: int) -> float:
        return -float(len(str(proposal.changes["x"])))

    values = [trial.proposal.changes["x"] for trial in simulate(made, score).trials.values()]
    return [value for place, value in enumerate(values) if value not in values[:place]]


@pytest.mark.parametrize("method", METHODS)
def test_every_value_that_a_choice_lists_is_tried(method: str) -> None:
    assert sorted(tried(method, Choice(MANY))) == list(MANY)


@pytest.mark.parametrize("method", METHODS)
def test_of_a_range_eight_numbers_are_tried_and_the_method_says_so_and_what_helps(method: str) -> None:
    assert len(tried(method, Uniform(0.0, 1.0))) == 8
    space: dict[str, Dimension] = {"a": Uniform(0.0, 1.0), "b": Integer(1, 9), "c": Integer(1, 8), "d": Choice(MANY)}
    space |= {"e": Binary()}
    for around in ({"type": method}, {"type": "median_stopping", "proposals": {"type": method}}):
        made = make_method(**around, space=space, trials=8, **(METHODS[method] if around["type"] == method else {}))
        [caution] = made.cautions()
        assert caution.startswith(f"{method} tries at most 8 numbers of a range, evenly over it, and so of a, b; list")
    assert make_method(method, space={}, architecture=Layers(1), trials=8, **METHODS[method]).cautions() == ()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values", [([8], [4, 4], []), ({"type": "sgd", "lr": 0.1}, {"type": "adam"}, "none")])
def test_a_choice_of_lists_or_sections_is_answered_as_one_of_names_is(method: str, values: tuple[Any, ...]) -> None:
    assert sorted(map(str, tried(method, Choice(values), y=Choice((0, 1))))) == sorted(map(str, values))


def test_a_trial_that_failed_counts_as_the_worst_whatever_it_had_reported_before() -> None:
    evaluations = Evaluations()
    for trial, key in enumerate("abc"):
        evaluations.begin(key, trial)
    evaluations.end(Finished(0, "succeeded", 4, 0.5))
    evaluations.end(Finished(1, "failed", 2, 0.9))
    evaluations.end(Finished(2, "stopped", 2, 0.2))
    assert [evaluations.score(key) for key in "abc"] == [0.5, 0.2, 0.2]


def test_a_trial_that_failed_before_any_had_a_score_is_known_and_no_better_than_the_first_that_has_one() -> None:
    evaluations = Evaluations()
    for trial, key in enumerate("ab"):
        evaluations.begin(key, trial)
    evaluations.end(Finished(0, "failed"))
    assert evaluations.is_known("a")
    assert evaluations.score("a") is None
    evaluations.end(Finished(1, "succeeded", 4, -2.5))
    assert evaluations.score("a") == evaluations.score("b") == -2.5


@pytest.mark.parametrize("method", METHODS)
def test_a_method_whose_first_trials_all_fail_goes_on_to_the_best(method: str) -> None:
    def score(proposal: Proposal, _step: int) -> float:
        if proposal.trial < 6:
            raise RuntimeError("out of memory")
        return -1.0 - sum(proposal.changes.values())

    space = {name: Choice((0, 1, 2)) for name in "abc"}
    found = simulate(make_method(method, space=space, trials=27, **METHODS[method]), score)
    assert found.best.score is not None
    assert found.best.score >= -2.0

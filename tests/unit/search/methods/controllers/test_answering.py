"""Searches that are answered choice by choice: which values are offered, and what is known of answers."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.search.methods.base import Proposal
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


def tried(method: str, dimension: Dimension, *, trials: int = 60) -> list[Any]:
    """Return the values of a key that a method tries, each once."""
    made = make_method(method, space={"x": dimension}, trials=trials, **METHODS[method])

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
    assert sorted(map(str, tried(method, Choice(values)))) == sorted(map(str, values))

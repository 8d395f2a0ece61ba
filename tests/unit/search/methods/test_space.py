"""A point of a space has the keys whose conditions hold; methods propose no others, and no point that is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.base import Exploit
from orchestray.search.methods.conditions import Conditions, conditions_of
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform
from support.replayed import replay

WHEN = {
    "momentum": {"type": "sgd"},
    "nesterov": {"type": ["sgd", "rmsprop"], "momentum": [0.5, 0.9]},
    "beta": {"type": "adam", "task": "deep"},
    "never": {"task": "flat"},
}
DISCRETE: Mapping[str, Dimension] = {
    "nesterov": Binary(),
    "momentum": Choice((0.0, 0.5, 0.9)),
    "type": Choice(("sgd", "adam", "rmsprop")),
    "beta": Choice((0.9, 0.99)),
    "never": Binary(),
}
POINTS = 1 + 2 * 2 + 2 + 1
"""sgd without momentum, sgd with either of two and either flag, adam with either beta, rmsprop."""


def conditions() -> Conditions:
    return conditions_of(WHEN, {"task": "deep"})


def discrete(**more: Any) -> Space:
    return Space(DISCRETE, conditions(), **more)


def keys_of(values: Mapping[str, Any]) -> set[str]:
    """Return the keys that a point of `DISCRETE` must have, and no others."""
    keys = {"type"}
    if values["type"] == "sgd":
        keys |= {"momentum"} | ({"nesterov"} if values["momentum"] else set())
    return keys | ({"beta"} if values["type"] == "adam" else set())


def test_every_point_is_listed_once_with_its_keys_and_counted() -> None:
    points = list(discrete().points())
    assert [set(point) for point in points] == [keys_of(point) for point in points]
    assert len({json.dumps(point) for point in points}) == len(points) == discrete().num_points == POINTS


def test_points_of_a_range_of_billions_are_listed_one_at_a_time() -> None:
    space = Space({"seed": Integer(0, 2**62), "b": Binary()}, conditions_of({"b": {"seed": 1}}, {}))
    assert list(islice(space.points(), 3)) == [{"seed": 0}, {"seed": 1, "b": False}, {"seed": 1, "b": True}]
    assert space.num_points is None


def test_drawn_points_have_their_keys_in_the_order_of_the_space() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        drawn = discrete().sample(rng)
        assert list(drawn) == [key for key in DISCRETE if key in keys_of(drawn)]
        placed = discrete().from_units(rng.random(len(DISCRETE)))
        assert set(placed) == keys_of(placed)


def test_a_change_takes_keys_away_and_draws_new_ones() -> None:
    rng = np.random.default_rng(0)
    before = {"nesterov": True, "momentum": 0.9, "type": "adam"}
    after = discrete().completed(before, rng)
    assert set(after) == {"type", "beta"}
    back = discrete().completed(after | {"type": "sgd", "momentum": 0.5}, rng)
    assert back == {"nesterov": back["nesterov"], "momentum": 0.5, "type": "sgd"}


def test_a_condition_may_be_on_a_key_inside_a_section_that_is_a_choice() -> None:
    sections = Choice(({"type": "sgd", "lr": 1}, {"type": "adam"}))
    when = conditions_of({"o.lr": {"o.type": "sgd"}, "x": {"o.lr": [1, 2]}}, {})
    space = Space({"x": Binary(), "o.lr": Choice((2, 3)), "o": sections}, when)
    assert [sorted(point) for point in space.points()] == [["o", "o.lr", "x"]] * 2 + [["o", "o.lr"], ["o"]]


def test_true_and_1_are_different_values_of_a_condition() -> None:
    space = Space({"a": Choice((1, True)), "b": Binary()}, conditions_of({"b": {"a": True}}, {}))
    assert space.active({"a": 1, "b": False}) == {"a": 1}
    assert space.active({"a": True, "b": False}) == {"a": True, "b": False}


def test_keys_that_depend_on_each_other_in_a_circle_are_refused() -> None:
    with pytest.raises(ValueError, match="a -> b -> a"):
        Space({"a": Binary(), "b": Binary()}, conditions_of({"a": {"b": True}, "b": {"a": True}}, {}))


MIXED: Mapping[str, Dimension] = {**DISCRETE, "lr": Uniform(0.1, 1.0), "width": Integer(1, 50)}
BITS: Mapping[str, Dimension] = {key: Binary() for key in "abcdef"}
METHODS: dict[str, dict[str, Any]] = {
    "grid": {"points": {"lr": 2, "width": 2}},
    "random": {},
    "sobol": {"type": "random", "sequence": "sobol"},
    "gp": {"type": "bayesian", "initial": 4},
    "tpe": {"type": "bayesian", "model": "tpe", "initial": 4},
    "particle_swarm": {"population": 4},
    "asha": {"grace_steps": 1},
    "median_stopping": {},
    "population_based_training": {"population": 5, "interval_steps": 1, "fraction": 0.5},
    "regularized_evolution": {"population": 5},
    "large_scale_evolution": {},
    "reinforce": {},
    "q_learning": {},
    "progressive": {},
    "tree_search": {},
}


def method_of(name: str, space: Space) -> Any:
    given = {"type": name, **METHODS[name]}
    trials = 5 if name == "population_based_training" else 24
    return make_method(**given, space=space, seed=3, trials=trials, steps_per_trial=4)


def score(proposal: Any, step: int) -> float:
    values = proposal.changes
    return step * 0.01 + values.get("momentum", 0.3) + values.get("beta", 0.0) - abs(values["lr"] - 0.4)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_proposes_points_with_their_keys_and_none_that_are_refused(name: str) -> None:
    def is_refused(values: Mapping[str, Any]) -> bool:
        return bool(values["type"] == "sgd" and values["momentum"] == 0.5)

    space = Space(MIXED, conditions(), is_refused)
    method = method_of(name, space)
    searched = simulate(method, score, workers=2)
    proposed = [call.answer.changes for call in searched.calls if call.name == "ask" and call.answer is not None]
    decided = [answer for call in searched.calls for answer in (call.answer if call.name == "released" else [])]
    proposed += [
        decision.changes
        for call in [*(call.answer for call in searched.calls), *(decision for _, decision in decided)]
        for decision in [call]
        if isinstance(decision, Exploit)
    ]
    assert len(proposed) >= 5
    for values in proposed:
        assert set(values) == keys_of(values) | {"lr", "width"}
        assert not is_refused(values)
    assert len({values["type"] for values in proposed}) > 1
    replay(method_of(name, space), searched.calls)


@pytest.mark.parametrize("name", ["spectral", "genetic_cnn"])
def test_methods_of_bits_leave_out_the_keys_that_a_point_lacks(name: str) -> None:
    given = {"samples": 8} if name == "spectral" else {"population": 6}
    space = Space(BITS, conditions_of({"b": {"a": True}, "c": {"b": True}}, {}), lambda values: values["d"])
    method = make_method(name, space=space, trials=20, **given)
    searched = simulate(method, lambda proposal, _step: float(sum(proposal.changes.values())))
    for trial in searched.trials.values():
        values = trial.proposal.changes
        assert not values["d"]
        assert ("b" in values) == values["a"]
        assert ("c" in values) == values.get("b", False)


@pytest.mark.parametrize("name", ["grid", "random", "sobol", "gp", "tpe", "asha"])
@pytest.mark.parametrize("is_skipping", [False, True])
def test_a_finite_space_is_never_trained_twice_and_the_search_ends(name: str, is_skipping: bool) -> None:
    skipped = {"is_refused": lambda values: values["type"] == "rmsprop"} if is_skipping else {}
    given: dict[str, Any] = {"type": name, **METHODS[name], **({"points": {}} if name == "grid" else {})}
    method = make_method(**given, space=discrete(**skipped), seed=1, trials=100, steps_per_trial=4)
    searched = simulate(method, lambda proposal, _step: float(len(proposal.changes)), workers=3)
    points = [json.dumps(trial.proposal.changes, sort_keys=True) for trial in searched.trials.values()]
    assert len(points) == len(set(points)) == POINTS - is_skipping
    assert method.is_done

"""The first trials of a search as its user wants them, for every method that proposes hyper-parameters."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Observation
from orchestray.search.registry.check import method_of
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import Choice, Dimension, Integer
from support.search_configs import tiny_search

LR, MOMENTUM, ON = "train.optimizer.lr", "train.optimizer.momentum", "train.optimizer.nesterov"
SPACE = {
    LR: {"type": "log_uniform", "low": 1e-3, "high": 1.0},
    MOMENTUM: {"type": "choice", "values": [0.1, 0.5, 0.8]},
}
START = [{LR: 0.1, MOMENTUM: 0.5}, {MOMENTUM: 0.8}]
"""The second leaves out the rate, which is 0.25 in the base."""


def config(method: dict[str, Any], space: dict[str, Any] | None = None, **search: Any) -> Any:
    chosen = {"budget": {"trials": 9, "steps_per_trial": 60}, "start": START, **search}
    return tiny_search(space or SPACE, {"type": "sgd", "lr": 0.25, "momentum": 0.9}, method=method, **chosen)


@pytest.mark.parametrize(
    "method",
    [
        {"type": "grid", "points": {LR: 3}},
        {"type": "random"},
        {"type": "random", "sequence": "sobol"},
        {"type": "bayesian", "initial": 3},
        {"type": "bayesian", "initial": 2, "model": "tpe"},
        {"type": "asha", "proposals": {"type": "bayesian", "initial": 3}},
        {"type": "median_stopping"},
        {"type": "learning_curve"},
        {"type": "particle_swarm", "population": 3},
        {"type": "population_based_training", "population": 3},
        {"type": "regularized_evolution", "population": 3},
        {"type": "hierarchical_evolution", "population": 3},
        {"type": "large_scale_evolution", "population": 3, "inherit_weights": False},
    ],
)
def test_the_first_trials_are_those_of_start_completed_by_the_base(method: dict[str, Any]) -> None:
    made = method_of(config(method))
    points = []
    for _ in range(3):
        proposal = made.ask()
        assert proposal is not None
        points.append(dict(proposal.changes))
        if method["type"] not in ("population_based_training", "asha"):
            made.tell(Finished(proposal.trial, "succeeded", 60, proposal.changes[LR]))
    assert points[:2] == [{LR: 0.1, MOMENTUM: 0.5}, {LR: 0.25, MOMENTUM: 0.8}]
    assert points[2] not in points[:2]


def test_one_first_trial_needs_no_list() -> None:
    assert (
        config({"type": "random"}, start={LR: 0.1}).first_trials
        == config({"type": "random"}, start=[{LR: 0.1}]).first_trials
    )


def test_a_value_of_the_base_outside_of_the_space_is_left_to_the_method() -> None:
    plain, begun = (method_of(config({"type": "random"}, start=start)) for start in ([], [{LR: 0.1}]))
    first, other = plain.ask(), begun.ask()
    assert first is not None
    assert other is not None
    assert other.changes == {LR: 0.1, MOMENTUM: first.changes[MOMENTUM]}


def test_a_grid_tries_each_of_its_points_once_beside_those_of_start() -> None:
    made = method_of(config({"type": "grid", "points": {LR: 2}}, budget={"steps_per_trial": 4}))
    points = []
    while (proposal := made.ask()) is not None:
        points.append(tuple(proposal.changes.values()))
    assert len(points) == len(set(points)) == 2 + 2 * 3
    on_grid = config(
        {"type": "grid", "points": {LR: 2}}, start=[{LR: 1.0, MOMENTUM: 0.1}], budget={"steps_per_trial": 4}
    )
    made, num = method_of(on_grid), 0
    while made.ask() is not None:
        num += 1
    assert num == 2 * 3


def test_switches_that_spectral_begins_with_are_samples_of_its_stage() -> None:
    space = {f"{MOMENTUM}": {"type": "choice", "values": [0.1, 0.5]}, ON: {"type": "binary"}}
    made: Any = method_of(
        config({"type": "spectral", "samples": 4, "degree": 1}, space, start=[{MOMENTUM: 0.5, ON: True}])
    )
    proposal = made.ask()
    assert proposal.changes == {MOMENTUM: 0.5, ON: True}
    assert made._signs[0].tolist() == [-1, -1]


@pytest.mark.parametrize(
    "method", [{"type": "random"}, {"type": "particle_swarm", "population": 2}, {"type": "spectral", "samples": 4}]
)
def test_first_trials_of_1_and_of_true_are_two_with_these_values(method: dict[str, Any]) -> None:
    space = {"task.start": {"type": "choice", "values": [1, True]}}
    made: Any = method_of(config(method, space, start=[{"task.start": True}, {"task.start": 1}]))
    first = made.ask(), made.ask()
    assert [repr(one.changes["task.start"]) for one in first] == ["True", "1"]
    if method["type"] == "spectral":
        assert [made._signs[number].tolist() for number in (0, 1)] == [[-1], [1]]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ([{LR: 2.0}], "search.start.0.train.optimizer.lr: must be a number from 0.001 to 1, got 2"),
        ([{"train.optimizer.lt": 0.1}], "search.start.0.train.optimizer.lt: is no key of search.space; did you mean"),
        ([{LR: 0.1}, {LR: 0.1}], "search.start.1: is search.start.0 as well: name each trial once"),
        (
            [{LR: 0.1 + n / 100} for n in range(10)],
            r"search.start: must have at most the budget's trials \(9\), got 10",
        ),
    ],
)
def test_first_trials_that_cannot_be_are_refused(start: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config({"type": "random"}, start=start)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"type": "population_based_training", "population": 2}, "search.start: has 3 trials, and the population 2"),
        ({"type": "omnivore"}, "search.start: is not for omnivore, which chooses all of its trials itself"),
        ({"type": "regularized_evolution", "population": 2}, "search.start: has 3 trials, and the population 2"),
    ],
)
def test_a_method_that_cannot_begin_with_them_says_so(method: dict[str, Any], expected: str) -> None:
    space = {MOMENTUM: SPACE[MOMENTUM]} if method["type"] == "omnivore" else None
    start = [{MOMENTUM: 0.1}, {MOMENTUM: 0.5}, {MOMENTUM: 0.8}]
    with pytest.raises(ConfigError, match=expected):
        method_of(config(method, space, start=start))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("bayesian", {"initial": 2}),
        ("bayesian", {"initial": 2, "model": "tpe"}),
        ("regularized_evolution", {"population": 4}),
        ("hierarchical_evolution", {"population": 4, "initial_mutations": 1}),
    ],
)
def test_points_that_are_learnt_are_not_tried_again_but_to_begin_with(method: str, arguments: dict[str, Any]) -> None:
    space: dict[str, Dimension] = {"n": Integer(1, 4), "kind": Choice(("a", "b", "c"))}
    learnt = [{"n": n, "kind": kind} for n in (1, 2, 3) for kind in ("a", "b", "c")]
    made = make_method(method, space=space, trials=20, **arguments)
    assert made.begin_with([learnt[0]])
    assert made.learn([Observation(values, None, float(values["n"])) for values in learnt])
    points = []
    while (proposal := made.ask()) is not None:
        points.append(dict(proposal.changes))
        made.tell(Finished(proposal.trial, "succeeded", 1, float(proposal.changes["n"])))
    assert points[0] == learnt[0]
    new = [{"n": 4, "kind": kind} for kind in ("a", "b", "c")]
    assert sorted(map(str, points[1:])) == sorted(map(str, new))

"""First trials of spaces with conditional keys and refused combinations: completed by the base, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.methods.base import Observation
from orchestray.search.registry.check import method_of
from support.search_configs import tiny_search

TYPE, MOMENTUM, DECAY, BATCH = (
    "train.optimizer.type",
    "train.optimizer.momentum",
    "train.optimizer.weight_decay",
    "train.batch_size",
)
SPACE = {
    TYPE: {"type": "choice", "values": ["sgd", "adamw"]},
    MOMENTUM: {"type": "uniform", "low": 0.0, "high": 0.95, "when": {TYPE: "sgd"}},
    DECAY: {"type": "log_uniform", "low": 1e-4, "high": 0.1, "when": {TYPE: ["adamw"]}},
}
UNCONDITIONAL = {TYPE: SPACE[TYPE], MOMENTUM: {"type": "uniform", "low": 0.0, "high": 0.95}}
METHODS = [
    {"type": "grid", "points": {MOMENTUM: 2, DECAY: 2}},
    {"type": "random"},
    {"type": "random", "sequence": "sobol"},
    {"type": "bayesian", "initial": 3},
    {"type": "bayesian", "initial": 2, "model": "tpe"},
    {"type": "asha", "proposals": {"type": "bayesian", "initial": 3}},
    {"type": "particle_swarm", "population": 4},
    {"type": "population_based_training", "population": 4},
    {"type": "regularized_evolution", "population": 4},
    {"type": "hierarchical_evolution", "population": 4},
    {"type": "large_scale_evolution", "population": 4, "inherit_weights": False},
]


def config(start: Any, space: Any = SPACE, optimizer: Any = None, **search: Any) -> Any:
    chosen = {"method": {"type": "random"}, "budget": {"trials": 9, "steps_per_trial": 60}, "start": start, **search}
    return tiny_search(space, optimizer or {"type": "sgd", "lr": 0.25, "momentum": 0.9}, **chosen)


def test_a_first_trial_has_the_values_of_the_base_for_the_keys_that_it_has() -> None:
    assert config([{}, {TYPE: "adamw"}, {TYPE: "adamw", DECAY: 0.1}]).first_trials == [
        {TYPE: "sgd", MOMENTUM: 0.9},
        {TYPE: "adamw"},
        {TYPE: "adamw", DECAY: 0.1},
    ]


@pytest.mark.parametrize("method", METHODS)
def test_first_trials_are_points_of_the_space_whatever_proposes_the_rest(method: dict[str, Any]) -> None:
    made = method_of(config([{}, {TYPE: "adamw", DECAY: 0.02}, {TYPE: "adamw"}], method=method))
    proposals = [made.ask() for _ in range(4)]
    points = [dict(proposal.changes) for proposal in proposals if proposal is not None]
    assert points[:2] == [{TYPE: "sgd", MOMENTUM: 0.9}, {TYPE: "adamw", DECAY: 0.02}]
    assert points[2] == {TYPE: "adamw", DECAY: points[2][DECAY]}
    assert points[3] not in points[:3]


@pytest.mark.parametrize(
    ("start", "optimizer", "expected"),
    [
        ({MOMENTUM: 0.5, TYPE: "adamw"}, None, f"{TYPE}: 'sgd', and this first trial has 'adamw'; name such a value"),
        ({MOMENTUM: 0.5}, {"type": "lars", "lr": 0.1}, f"{TYPE}: 'sgd', and this first trial does not name it"),
    ],
)
def test_a_key_that_a_first_trial_does_not_have_is_refused_with_what_it_needs(
    start: Any, optimizer: Any, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"search.start.{MOMENTUM}: exists only under {expected}") as caught:
        config(start, optimizer=optimizer)
    assert len(caught.value.problems) == 1


def test_a_first_trial_that_the_base_refuses_is_an_error_and_one_that_can_be_completed_is_not() -> None:
    with pytest.raises(ConfigError, match=rf"search.start.0: the base config refuses .*{MOMENTUM}: is no key of adamw"):
        config([{TYPE: "adamw"}], UNCONDITIONAL)
    left_out = {"type": "lars", "lr": 0.1, "momentum": 0.9}  # the type of the base is outside of the space
    made = method_of(config([{MOMENTUM: 0.5}], UNCONDITIONAL, optimizer=left_out))
    for _ in range(4):
        proposal = made.ask()
        assert proposal is not None
        assert proposal.changes[TYPE] == "sgd"


def test_first_trials_and_combinations_are_judged_with_the_steps_that_fill_the_samples() -> None:
    every, optimizer = "strategy.exchange.every", {"type": "sgd", "lr": 0.1}
    space = {BATCH: {"type": "choice", "values": [8, 32]}, every: {"type": "choice", "values": [5, 20]}}
    source: dict[str, Any] = {
        "name": "begun",
        "base": {
            "task": {"type": "support.tiny_task:TinyTask"},
            "train": {"batch_size": 8, "optimizer": optimizer},
            "strategy": {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 20}},
        },
        "search": {
            "method": {"type": "random"},
            "objective": {"metric": "accuracy"},
            "space": space,
            "budget": {"trials": 2, "samples_per_trial": 320},
        },
    }
    refused = [dict(one) for one in load_search_config(source).combinations.refused]
    assert refused == [{BATCH: 32, every: 20}], "10 steps, in which the replicas never meet"
    source["search"]["start"] = [{BATCH: 32}]
    with pytest.raises(
        ConfigError, match=r"search.start.0: the base config refuses .* never meet in a run of 10 steps"
    ):
        load_search_config(source)


@pytest.mark.parametrize("method", METHODS[:6])
def test_a_first_trial_is_not_tried_again_and_values_are_those_of_the_space(method: dict[str, Any]) -> None:
    space = {TYPE: SPACE[TYPE], BATCH: {"type": "choice", "values": [8, 16]}}
    method = {key: value for key, value in method.items() if key != "points"}
    made = method_of(
        config(
            [{TYPE: "adamw", BATCH: 16.0}, {BATCH: 8}, {}],
            space,
            method=method,
            budget={"trials": 9, "steps_per_trial": 4},
        )
    )
    points = []
    while (proposal := made.ask()) is not None:
        points.append(dict(proposal.changes))
    assert points[:2] == [{TYPE: "adamw", BATCH: 16}, {TYPE: "sgd", BATCH: 8}]
    assert isinstance(points[0][BATCH], int)
    assert len(points) == len({tuple(one.values()) for one in points}) == 4


def test_a_particle_flies_on_from_the_first_trial_that_it_was_given() -> None:
    made: Any = method_of(config({TYPE: "sgd", MOMENTUM: 0.19}, method={"type": "particle_swarm", "population": 2}))
    proposal = made.ask()
    assert proposal.changes == {TYPE: "sgd", MOMENTUM: 0.19}
    particle = made.particles[0]
    assert particle.best is particle.position
    assert made.space.from_units(particle.position) == {TYPE: "sgd", MOMENTUM: pytest.approx(0.19)}


def test_a_switch_that_a_first_trial_lacks_has_a_random_sign_among_the_samples_of_spectral() -> None:
    flag = {"type": "binary", "when": {TYPE: "sgd"}}
    space = {TYPE: SPACE[TYPE], "train.optimizer.nesterov": flag}
    method = {"type": "spectral", "samples": 4, "degree": 1}
    made: Any = method_of(config({TYPE: "adamw"}, space, method=method))
    assert made.ask().changes == {TYPE: "adamw"}
    assert made._signs[0][0] == -1
    assert abs(made._signs[0][1]) == 1
    learnt: Any = method_of(config([], space, method={**method, "samples": 9}))
    assert learnt.learn([Observation({TYPE: "adamw"}, None, score / 8) for score in range(8)])
    signs = {tuple(one.tolist()) for one in learnt._signs.values()}
    assert signs == {(-1, -1), (-1, 1)}


@pytest.mark.parametrize("method", METHODS)
def test_a_first_trial_under_which_some_combinations_are_refused_is_completed_by_one_that_is_not(
    method: dict[str, Any],
) -> None:
    left_out = {"type": "lars", "lr": 0.1, "momentum": 0.9}
    for seed in range(4):
        method = {**method, **({"points": {MOMENTUM: 3}} if method["type"] == "grid" else {})}
        made = method_of(config({MOMENTUM: 0.5}, UNCONDITIONAL, optimizer=left_out, method=method, seed=seed))
        proposal = made.ask()
        assert proposal is not None
        assert proposal.changes == {TYPE: "sgd", MOMENTUM: 0.5}

"""The method inside early stopping is held to what a method by itself is, and says where it is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.config.schema import SearchConfig
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import Uniform
from support.search_configs import GOOD

STOPPING = ("asha", "median_stopping", "learning_curve")


def loaded(kind: str, proposals: Any, *overrides: str, **search: Any) -> SearchConfig:
    source = copy.deepcopy(GOOD)
    source["search"] |= {"method": {"type": kind, "proposals": proposals}, **search}
    return load_search_config(source, overrides)


def problems(kind: str, proposals: Any, **search: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(kind, proposals, **search)
    return [problem.removeprefix("config: search.") for problem in caught.value.problems]


@pytest.mark.parametrize("kind", STOPPING)
@pytest.mark.parametrize(
    ("proposals", "expected"),
    [
        ({"type": "bayesian", "initail": 3}, "initail: is no known key; did you mean 'initial'?"),
        ({"type": "bayesian", "initial": 1}, "initial: must be >= 2, got 1"),
        ({"initial": 3}, "type: is required, and missing; there are grid, random, bayesian, particle_swarm, spectral"),
        ({"type": "bayesain"}, "type: must be one of grid, random, bayesian, particle_swarm, spectral"),
        (
            {"type": "regularized_evolution", "population": 9},
            "population: must be at most the budget's trials (4), got 9",
        ),
    ],
)
def test_its_keys_are_checked_each_with_its_place(kind: str, proposals: Mapping[str, Any], expected: str) -> None:
    (problem,) = problems(kind, proposals)
    assert problem.startswith(f"method.proposals.{expected}")


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("asha", "asha ends trials early itself"),
        ("learning_curve", "learning_curve ends trials early itself"),
        ("population_based_training", "population_based_training steers its members while they train"),
        ("omnivore", "omnivore steers its members while they train"),
        ("enas", "enas trains one network for all candidates"),
    ],
)
def test_what_must_not_be_stopped_is_refused_with_the_reason_also_without_a_config(inner: str, reason: str) -> None:
    (problem,) = problems("median_stopping", {"type": inner})
    assert problem.startswith(f"method.proposals: {reason}")
    with pytest.raises(ConfigError, match=reason):
        make_method("asha", space={"x": Uniform(0.0, 1.0)}, trials=4, steps_per_trial=8, proposals={"type": inner})


def test_a_grid_inside_needs_points_for_a_continuous_key_and_no_number_of_trials() -> None:
    (problem,) = problems("asha", {"type": "grid"})
    assert problem.startswith("space.train.optimizer.lr: a grid needs to know how many of its values to try")
    assert "search.method.proposals.points: {train.optimizer.lr: N}" in problem
    override = "search.method.proposals.points.train.optimizer.lr=3"
    config = loaded("asha", {"type": "grid"}, override, budget={"steps_per_trial": 8})
    assert config.search.method.arguments["proposals"]["points"] == {"train.optimizer.lr": 3}
    (problem,) = problems("asha", {"type": "grid", "points": {"train.optimizer.lr": 3, "lr": 2}})
    assert problem.startswith("method.proposals.points.lr: is no key of search.space")


def test_what_the_method_inside_can_search_is_what_can_be_searched() -> None:
    assert problems("asha", {"type": "codeepneat", "population": 4})[0].startswith(
        "architecture: is required by codeepneat"
    )
    assert problems("asha", {"type": "particle_swarm", "population": 4}, architecture={"space": "chain"})[0].startswith(
        "architecture: is not for particle_swarm"
    )


def test_a_config_with_a_method_inside_comes_back_from_what_is_written_of_it() -> None:
    config = loaded("learning_curve", {"type": "bayesian", "model": "tpe"})
    assert load_search_config(config.model_dump(mode="json")) == config
    given = config.search.method.arguments
    assert given["proposals"] == {"type": "bayesian", "model": "tpe", "initial": None, "pending": "believer"}

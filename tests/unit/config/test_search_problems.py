"""What is wrong with a search config: every problem at once, each with its key and what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.config.search.load import load_search_config
from orchestray.platform.errors import ConfigError
from support.search_configs import BASE, GOOD


def problems(*overrides: str, **search: Any) -> list[str]:
    """The lines a user reads, without the file's name; `search` are keys of that section."""
    source = copy.deepcopy(GOOD)
    source["search"] |= search
    with pytest.raises(ConfigError) as caught:
        load_search_config(source, overrides)
    return [problem.removeprefix("config: ") for problem in caught.value.problems]


def test_every_part_says_what_is_wrong_with_it_at_once() -> None:
    found = problems(
        "base.train.optimizer.momentun=0.9",
        "search.parallel=0",
        "search.budget.trails=3",
        "search.objective.mode=best",
        "search.space.train.batch_sise={type: integer, low: 1, high: 4}",
        "search.space.train.accumulate={type: choice, values: [1, 0]}",
        "serach=3",
    )
    assert found == [
        "base.train.optimizer.momentun: is no known key; did you mean 'momentum'?",
        "search.objective.mode: must be one of max, min, got 'best'",
        "search.budget.trails: is no known key; did you mean 'trials'?",
        "search.parallel: must be >= 1, got 0",
        "serach: is no known key; did you mean 'search'?",
        "search.space.train.batch_sise: is no key of the base config; did you mean 'train.batch_size'?",
        "search.space.train.accumulate: the base config refuses the value 0: must be >= 1, got 0",
    ]


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (
            {"type": "uniform", "low": 2, "high": 1},
            "train.optimizer.lr.low: must be less than high (1), got 2; are the two reversed?",
        ),
        (
            {"type": "log_uniform", "low": 0.0, "high": 1},
            "train.optimizer.lr.low: must be > 0, got 0: log_uniform is even in the logarithm",
        ),
        (
            {"type": "uniform", "low": 1, "high": 1},
            (
                "train.optimizer.lr.low: is high as well (1): set train.optimizer.lr in the base and take it out of "
                "the space"
            ),
        ),
        (
            {"type": "unifrom", "low": 1, "high": 1},
            (
                "train.optimizer.lr.type: must be one of uniform, log_uniform, integer, log_integer, choice, binary, "
                "got 'unifrom'; did you mean 'uniform'?"
            ),
        ),
        ({"type": "choice"}, "train.optimizer.lr.values: is required, and missing"),
        ({"type": "uniform", "low": "a", "high": 1}, "train.optimizer.lr.low: must be a number, got 'a'"),
        (
            {"type": "choice", "values": [0.1, "fast"]},
            "train.optimizer.lr: the base config refuses the value \"'fast'\": must be a number, got 'fast'",
        ),
        (
            {"type": "uniform", "low": -1, "high": 1},
            "train.optimizer.lr: the base config refuses the value -1.0: must be > 0, got -1.0",
        ),
    ],
)
def test_a_dimension_that_is_wrong_is_named_by_its_key(dimension: dict[str, Any], expected: str) -> None:
    expected = expected.replace("\"'fast'\"", "'fast'")
    assert problems(space={"train.optimizer.lr": dimension}) == [f"search.space.{expected}"]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.optimizer.lrr", "is no key of the base config; did you mean 'train.optimizer.lr'?"),
        ("task.hiden", "is no key of the base config; did you mean 'task.hidden'?"),
        ("task.hidden.2", "is no key of the base config"),
        ("train.steps", "cannot be searched: it is what search.budget.steps_per_trial says"),
        ("name", "cannot be searched: it names the run, and is given to each trial by the search"),
        ("train.optimizer.zzz", "is no key of the base config; known in train.optimizer: lr, momentum"),
    ],
)
def test_a_key_that_the_base_lacks_is_told_with_the_nearest_there_is(key: str, expected: str) -> None:
    (found,) = problems(space={key: {"type": "integer", "low": 1, "high": 4}})
    assert found.startswith(f"search.space.{key}: {expected}")


def test_arguments_of_a_users_own_task_are_looked_up_in_its_file(tmp_path: Path) -> None:
    methods = "".join(f"    def {name}(self, *a): ...\n" for name in ("build_model", "dataset", "to_batch", "loss"))
    (tmp_path / "mine.py").write_text(
        f"class Mine:\n    def __init__(self, width=3): ...\n{methods}    def metrics(self, *a): ...\n"
    )
    base = {**BASE, "task": {"type": f"{tmp_path / 'mine.py'}:Mine"}}
    space = {key: {"type": "integer", "low": 1, "high": 4} for key in ("task.width", "task.widht")}
    with pytest.raises(ConfigError) as caught:
        load_search_config({**GOOD, "base": base, "search": {**GOOD["search"], "space": space}})
    assert [line.removeprefix("config: ") for line in caught.value.problems] == [
        "search.space.task.widht: the base config refuses the value 1: is no argument of Mine; did you mean 'width'?"
    ]


def test_a_value_that_is_right_beside_what_else_is_searched_is_taken() -> None:
    source = copy.deepcopy(GOOD)
    source["search"]["space"] = {"train.optimizer.nesterov": {"type": "binary"}}
    with pytest.raises(ConfigError, match="needs a momentum"):
        load_search_config(source)
    source["search"]["space"]["train.optimizer.momentum"] = {"type": "uniform", "low": 0.1, "high": 0.9}
    load_search_config(source)


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ({"space": {}}, "search.space: is required, and missing: name keys of the base config, or an architecture"),
        (
            {"method": {"type": "enas"}},
            "search.architecture: is required by enas, and missing: say which space of networks it searches",
        ),
        (
            {"method": {"type": "particle_swarm"}, "architecture": {"space": "cell"}, "budget": {"trials": 99}},
            (
                "search.architecture: is not for particle_swarm, which searches hyper-parameters; use random or "
                "bayesian, or an evolution"
            ),
        ),
        (
            {"method": {"type": "population_based_training", "population": 8}},
            "search.method.population: must be at most the budget's trials (4), got 8; raise search.budget.trials",
        ),
        (
            {"method": {"type": "grid"}},
            (
                "search.space.train.optimizer.lr: a grid needs to know how many of its values to try: say "
                "search.method.points: {train.optimizer.lr: N}, or make it a choice"
            ),
        ),
        (
            {"method": {"type": "grid", "points": {"train.optimizer.lr": 3, "train.optimiser.lr": 3}}},
            "search.method.points.train.optimiser.lr: is no key of search.space; did you mean 'train.optimizer.lr'?",
        ),
        (
            {"budget": {"steps_per_trial": 3}},
            "search.budget.trials: is required by random, and missing: how many trials may there be?",
        ),
        (
            {"architecture": {"space": "nothing.py:Mine"}},
            f"search.architecture.space: there is no file {Path.cwd() / 'nothing.py'}",
        ),
        ({"objective": []}, "search.objective: must be a list of 1 or more, got []"),
    ],
)
def test_what_does_not_fit_together_is_told_with_what_would(search: dict[str, Any], expected: str) -> None:
    assert expected in problems(**search)


@pytest.mark.parametrize(
    "gang",
    [
        "base.strategy.network.data=2",
        "base.strategy.exchange.type=parameter_server",
        "base.strategy.network.pipeline=2",
    ],
)
def test_a_limit_of_memory_is_refused_where_a_trial_is_more_than_one_process(gang: str) -> None:
    (found,) = problems(gang, "search.budget.trial_memory_mb=900")
    assert found.startswith("search.budget.trial_memory_mb: is for trials of one process, and ")
    assert "lower search.parallel" in found
    load_search_config(GOOD, [gang])
    load_search_config(GOOD, ["search.budget.trial_memory_mb=900"])


def test_a_limit_of_memory_is_refused_where_the_space_may_make_a_trial_more_than_one_process() -> None:
    workers = {"strategy.network.data": {"type": "choice", "values": [1, 2]}}
    (found,) = problems(space=workers, budget={"trials": 4, "steps_per_trial": 8, "trial_memory_mb": 900})
    assert found.startswith("search.budget.trial_memory_mb: ")
    assert "by search.space trials here may be a gang" in found


def test_the_length_of_a_trial_is_asked_for_where_the_base_has_only_epochs() -> None:
    (found,) = problems(budget={"trials": 4})
    assert found.startswith("search.budget.steps_per_trial: is required, and missing")


def test_a_base_that_is_not_there_or_no_config_is_named(tmp_path: Path) -> None:
    assert problems("base=nowhere.yaml") == [f"base: {Path.cwd() / 'nowhere.yaml'}: there is no such file"]
    assert problems("base=3") == ["base: must be the path of a training config, or one itself, got 3"]
    with pytest.raises(ConfigError, match="config: base: is required, and missing"):
        load_search_config({"name": "a", "search": GOOD["search"]})
    with pytest.raises(ConfigError, match="config: search: is required, and missing"):
        load_search_config({"name": "a", "base": BASE})

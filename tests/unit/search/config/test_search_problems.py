"""Messages on a wrong search config: every problem at once, each with its key and what to do."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.registry.check import check_method
from support.search_configs import BASE, GOOD

METHODS = "".join(f"    def {name}(self, *a): ...\n" for name in ("build_model", "dataset", "to_batch", "loss"))


def problems(*overrides: str, **search: Any) -> list[str]:
    """Return the lines a user reads, without the file's name; `search` are keys of that section."""
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
        ("train.steps", "cannot be searched: it is what search.budget says"),
        ("name", "cannot be searched: it names the run, and is given to each trial by the search"),
        ("train.optimizer.zzz", "is no key of the base config; known in train.optimizer: groups, lr, momentum"),
    ],
)
def test_a_key_that_the_base_lacks_is_told_with_the_nearest_there_is(key: str, expected: str) -> None:
    (found,) = problems(space={key: {"type": "integer", "low": 1, "high": 4}})
    assert found.startswith(f"search.space.{key}: {expected}")


def test_arguments_of_a_users_own_task_are_looked_up_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"class Mine:\n    def __init__(self, width=3): ...\n{METHODS}"
        "    def metrics(self, *a):\n        return {'accuracy': 1}\n"
    )
    base = {**BASE, "task": {"type": f"{tmp_path / 'mine.py'}:Mine"}}
    space = {key: {"type": "integer", "low": 1, "high": 4} for key in ("task.width", "task.widht")}
    with pytest.raises(ConfigError) as caught:
        load_search_config({**GOOD, "base": base, "search": {**GOOD["search"], "space": space}})
    assert [line.removeprefix("config: ") for line in caught.value.problems] == [
        "search.space.task.widht: the base config refuses the value 1: is no argument of Mine; did you mean 'width'?"
    ]


def test_a_base_that_is_refused_by_itself_blames_no_value_of_the_space(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def build_model(self): ...\n")
    found = problems(f"base.task={{type: '{tmp_path}/mine.py:Mine'}}", "search.objective.mode=max")
    assert all(problem.startswith("base.task.type: class Mine in mine.py lacks method") for problem in found)


def test_a_range_that_is_wider_than_floats_count_is_named_by_its_key(tmp_path: Path) -> None:
    metrics = "    def metrics(self, *a):\n        return {'accuracy': 1}\n"
    (tmp_path / "mine.py").write_text(f"class Mine:\n    def __init__(self, scale): ...\n{METHODS}{metrics}")
    base = {**BASE, "task": {"type": f"{tmp_path}/mine.py:Mine", "scale": 0.0}}
    space = {"task.scale": {"type": "uniform", "low": -1e308, "high": 1e308}}
    config = load_search_config({**GOOD, "base": base, "search": {**GOOD["search"], "space": space}})
    with pytest.raises(ConfigError, match=r"search\.space\.task\.scale: uniform: from -1e.308 to 1e.308 is wider"):
        check_method(config)


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


TOO_MANY: list[tuple[dict[str, Any], str]] = [
    ({"type": "bayesian", "initial": 5}, "initial"),
    ({"type": "spectral", "samples": 5}, "samples"),
    ({"type": "reinforce", "children": 5}, "children"),
    ({"type": "progressive", "beam": 5}, "beam"),
    ({"type": "particle_swarm", "population": 5}, "population"),
    ({"type": "codeepneat", "population": 4, "networks": 5}, "networks"),
]


@pytest.mark.parametrize(("method", "key"), TOO_MANY, ids=lambda value: value if isinstance(value, str) else "")
def test_no_generation_level_or_stage_of_a_method_is_larger_than_the_budget(method: dict[str, Any], key: str) -> None:
    expected = "must be at most the budget's trials (4), got 5; raise search.budget.trials"
    assert f"search.method.{key}: {expected}" in problems(method=method)
    fitting = {**method, key: 4}
    assert not any(line.startswith(f"search.method.{key}:") for line in problems("search.parallel=0", method=fitting))
    inside = {"type": "asha", "proposals": method}
    assert f"search.method.proposals.{key}: {expected}" in problems(method=inside)


ENAS: dict[str, Any] = {"type": "enas", "finalists": 3}
NETWORKS: dict[str, Any] = {"space": {}, "architecture": {"space": "cell"}}


def test_the_trial_that_trains_the_shared_weights_leaves_one_fewer_for_the_finalists() -> None:
    (found,) = problems("search.method.finalists=4", method=ENAS, **NETWORKS)
    assert found == (
        "search.method.finalists: must be at most 3, the budget's trials (4) without the one that trains the shared "
        "weights, got 4; raise search.budget.trials"
    )
    source = {**GOOD, "search": {**GOOD["search"], "method": ENAS, **NETWORKS}}
    load_search_config(source)
    load_search_config(source, ["search.method.finalists=2", "search.budget.trials=1"])  # the default asks for nothing


def test_a_median_of_more_trials_than_there_are_others_is_refused() -> None:
    method = {"type": "median_stopping", "min_trials": 4}
    assert problems(method=method) == [
        "search.method.min_trials: must be less than the budget's trials (4), or none is ever stopped; got 4"
    ]
    load_search_config({**GOOD, "search": {**GOOD["search"], "method": {**method, "min_trials": 3}}})
    load_search_config({**GOOD, "search": {**GOOD["search"], "method": {"type": "median_stopping"}}})


def test_a_metric_that_is_an_objective_twice_is_refused_whatever_its_mode() -> None:
    objective = [{"metric": "accuracy"}, {"metric": "loss"}, {"metric": "accuracy", "mode": "min"}]
    assert problems(objective=objective) == [
        "search.objective.2.metric: is that of search.objective.0 as well (accuracy): name each metric once"
    ]


INITIAL: list[tuple[str, Any, str]] = [
    ("train.optimizer.lr", 500, "must be a number from 0.0001 to 1, got 500"),
    ("train.optimizer.lr", True, "must be a number from 0.0001 to 1, got true"),
    ("train.optimizer.lr", float("nan"), "must be a number from 0.0001 to 1, got NaN"),
    ("train.batch_size", 2.5, "must be a whole number from 2 to 64, got 2.5"),
    ("train.optimizer.momentum", 0.7, "must be one of 0.5, 0.9, got 0.7"),
    ("train.optimizer.nesterov", 1, "must be false or true, got 1"),
]
EXPLORED = {
    "train.optimizer.lr": GOOD["search"]["space"]["train.optimizer.lr"],
    "train.batch_size": {"type": "log_integer", "low": 2, "high": 64},
    "train.optimizer.momentum": {"type": "choice", "values": [0.5, 0.9]},
    "train.optimizer.nesterov": {"type": "binary"},
}


@pytest.mark.parametrize(("key", "value", "expected"), INITIAL)
def test_first_values_of_a_population_lie_in_the_space(key: str, value: Any, expected: str) -> None:
    right = {"train.optimizer.lr": 1.0, "train.batch_size": 64, "train.optimizer.momentum": 0.9}
    method = {"type": "population_based_training", "population": 4, "initial": [right, {key: value}]}
    assert problems(method=method, space=EXPLORED) == [
        f"search.method.initial.1.{key}: {expected}, which is what search.space says of {key}"
    ]


def test_first_values_of_a_population_are_of_keys_of_the_space() -> None:
    method = {"type": "population_based_training", "population": 4, "initial": [{"train.optimizer.lrr": 0.5}]}
    assert problems(method=method, space=EXPLORED) == [
        "search.method.initial.0.train.optimizer.lrr: is no key of search.space; did you mean 'train.optimizer.lr'?"
    ]
    reversed_bounds = {"train.optimizer.lr": {"type": "uniform", "low": 2, "high": 1}}
    method["initial"] = [{"train.optimizer.lr": 1.5}]
    assert len(problems(method=method, space=reversed_bounds)) == 1, "one mistake is told once"


@pytest.mark.parametrize("method", ["darts", "enas", "smash"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("base.train.until={metric: loss, value: 0.1}", "base.train.until: weights that networks share train for all"),
        ("base.train.time_limit_s=5", "base.train.time_limit_s: .* use search.budget.trial_time_limit_s"),
    ],
    ids=["until", "time limit"],
)
def test_an_end_that_the_shared_weights_would_not_come_to_is_refused(override: str, expected: str, method: str) -> None:
    (found,) = problems(override, method={"type": method}, **NETWORKS)
    assert re.match(expected, found)


GANGS: list[tuple[str, str]] = [
    ("base.strategy.network={data: 2}", "base.strategy.network: must have one worker, got 2: "),
    ("base.strategy.network={pipeline: 3}", "base.strategy.network: must have one worker, got 3: "),
    (
        "base.strategy.exchange.type=parameter_server",
        "base.strategy.exchange.type: must be allreduce, got 'parameter_server': ",
    ),
    (
        "base.strategy={exchange: {type: parameter_server}, compression: {type: topk}}",
        "base.strategy.compression.type: must be none, got 'topk': ",
    ),
    ("base.faults=[{kill: worker/0, at_step: 3}]", "base.faults: must be empty: "),
]
PACKED = {"type": "population_based_training", "population": 4, "packed": True}


@pytest.mark.parametrize(("gang", "expected"), GANGS)
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (ENAS, "enas trains the weights that all networks share in one process"),
        ({"type": "darts"}, "darts trains the weights"),
        ({"type": "smash"}, "smash trains the weights"),
        (PACKED, "a packed population is one process"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_several_processes_are_refused_where_one_trains_for_many(
    method: dict[str, Any], why: str, gang: str, expected: str
) -> None:
    networks = {} if method is PACKED else NETWORKS
    found = problems(gang, "base.allow_faults=true", method=method, **networks)
    assert found[-1].startswith(expected + why)
    if method is PACKED:
        load_search_config(
            {**GOOD, "search": {**GOOD["search"], "method": {**PACKED, "packed": False}}},
            [gang, "base.allow_faults=true"],
        )


GROWING = "base.train.batch_schedule={type: steps, every_steps: 4, max_batch_size: 256}"


def test_batches_that_grow_are_refused_where_steps_are_not_counted_one_by_one() -> None:
    load_search_config(GOOD, [GROWING])
    (found,) = problems(GROWING, budget={"trials": 4, "epochs_per_trial": 2})
    assert found.startswith("base.train.batch_schedule: makes epochs of unequal numbers of steps")
    for changed in ([GROWING], ["base.train.noise_scale={decay: 0.9}", "base.train.accumulate=2"]):
        found = problems(*changed, method=PACKED)[-1]
        assert found.endswith("is not there for population_based_training in one process; take it out")


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


def test_a_class_of_a_notebook_is_refused_with_what_to_do_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ModuleType("__main__")
    exec("class InCell: ...", cell.__dict__)  # noqa: S102 - as a notebook does
    monkeypatch.setitem(sys.modules, "__main__", cell)
    for kind in (cell.InCell, "__main__:InCell"):
        for path in ("search.architecture.space", "base.task.type", "base.train.optimizer.type"):
            source = copy.deepcopy(GOOD)
            source["search"]["architecture"] = {"space": "chain"}
            place: Any = source
            *sections, last = path.split(".")
            for section in sections:
                place = place[section]
            place[last] = kind
            with pytest.raises(ConfigError, match=r"class InCell is written in a notebook.* give task\.py:InCell"):
                load_search_config(source)

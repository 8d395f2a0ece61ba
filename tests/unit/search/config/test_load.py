"""From a search config to what the search and each of its trials are given."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.config import yaml_text
from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import (
    dump_search_yaml,
    is_search_source,
    load_search_config,
    search_schema,
)
from orchestray.search.config.schema import Objective
from orchestray.search.config.trial import trial_config
from orchestray.trainers.config.load import load_train_config
from support.search_configs import GOOD


def config_of(*overrides: str, **search: Any) -> Any:
    source = copy.deepcopy(GOOD)
    source["search"] |= search
    return load_search_config(source, overrides)


def test_a_config_written_out_is_the_same_config() -> None:
    config = config_of(
        space={"train.batch_size": {"type": "choice", "values": [1, 2]}, "train.optimizer.nesterov": {"type": "binary"}}
        | GOOD["search"]["space"]
        | {"train.optimizer.momentum": {"type": "uniform", "low": 0.1, "high": 0.9}},
        objective=[{"metric": "accuracy"}, {"metric": "latency_ms"}],
    )
    assert load_search_config(yaml_text.read(dump_search_yaml(config))) == config


def test_the_base_is_found_beside_the_config_and_one_typed_on_the_command_line_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "search").mkdir()
    base = {**GOOD["base"], "name": "digits", "checkpoint": {"storage": "kept"}}
    (tmp_path / "train" / "a.yaml").write_text(yaml_text.write(base))
    (tmp_path / "here.yaml").write_text(yaml_text.write({**base, "name": "here"}))
    (tmp_path / "search" / "s.yaml").write_text(yaml_text.write({**GOOD, "base": "../train/a.yaml"}))
    config = load_search_config(tmp_path / "search" / "s.yaml", ["base.train.seed=7"], name="other")
    assert (config.name, config.base.name, config.base.train.seed) == ("other", "digits", 7)
    assert config.base.checkpoint.storage == str(tmp_path / "train" / "kept")
    monkeypatch.chdir(tmp_path)
    assert load_search_config(tmp_path / "search" / "s.yaml", ["base=here.yaml"]).base.name == "here"


def test_overrides_reach_into_dotted_keys_and_add_new_ones() -> None:
    config = config_of(
        "search.space.train.optimizer.lr.low=0.01",
        "search.space.train.batch_size={type: integer, low: 4, high: 8}",
        "search.method={type: grid}",
        "search.method.points.train.optimizer.lr=3",
    )
    assert config.search.space["train.optimizer.lr"].low == 0.01
    assert config.search.space["train.batch_size"].high == 8
    assert config.search.method.points == {"train.optimizer.lr": 3}


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("accuracy", "max"), ("loss", "min"), ("parameters", "min"), ("mean_error", "min"), ("latency_ms", "min")],
)
def test_the_mode_of_an_objective_follows_from_its_name(metric: str, mode: str) -> None:
    objective = Objective(metric=metric)
    assert objective.mode == mode
    assert objective.sign == (1.0 if mode == "max" else -1.0)


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_unknown_metric_needs_a_mode_that_the_task_or_the_config_says(tmp_path: Path, is_listed: bool) -> None:
    methods = "".join(f"\n    def {name}(self, *_): ..." for name in ("build_model", "dataset", "to_batch", "loss"))
    listed = "\n    lower_is_better = ('closeness',)" if is_listed else ""
    (tmp_path / "mine.py").write_text(f"class Mine:{listed}{methods}\n    metrics = loss\n")
    base = {**GOOD["base"], "task": {"type": f"{tmp_path}/mine.py:Mine"}}
    source = {**GOOD, "base": base, "search": {**GOOD["search"], "objective": {"metric": "closeness"}}}
    source["search"]["space"] = {"train.optimizer.lr": {"type": "uniform", "low": 0.1, "high": 0.2}}
    if is_listed:
        config = load_search_config(source)
        assert config.search.objective[0].mode == "min"
        assert load_search_config(yaml_text.read(dump_search_yaml(config))) == config
        return
    with pytest.raises(ConfigError, match=r"search\.objective\.mode: is required, and missing: .*mode: min"):
        load_search_config(source)
    assert load_search_config(source, ["search.objective.mode=max"]).search.objective[0].mode == "max"


def test_a_trial_is_an_ordinary_training_config_with_the_values_put_in() -> None:
    config = config_of()
    made = trial_config(config, {"train.optimizer.lr": 0.5, "task.hidden.1": 4}, steps=7, trial=3)
    assert made == load_train_config(made.model_dump(mode="json"))
    assert (made.name, made.train.steps, made.train.epochs) == ("a-trial-3", 7, None)
    assert made.train.optimizer.lr == 0.5
    assert made.task.arguments["hidden"] == [16, 4]
    assert trial_config(config, {}).train.steps == 20


def test_another_type_takes_along_what_was_said_and_leaves_what_it_does_not_know() -> None:
    config = config_of("base.train.optimizer.momentum=0.9", "base.train.optimizer.weight_decay=0.01")
    again = load_search_config(yaml_text.read(dump_search_yaml(config)))
    for each in (config, again):
        adam = trial_config(each, {"train.optimizer.type": "adam", "train.optimizer.lr": 0.5}).train.optimizer
        assert adam.model_dump() == {
            "type": "adam",
            "groups": (),
            "lr": 0.5,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.01,
        }


def test_a_genome_becomes_a_task_that_builds_its_network() -> None:
    config = config_of(architecture={"space": "chain"})
    from orchestray.search.methods.base import rng_of
    from orchestray.search.registry.check import space_of

    space = space_of(config)
    assert space is not None
    genome = space.sample(rng_of(0))
    made = trial_config(config, {"train.optimizer.lr": 0.5}, genome)
    assert made.task.type.endswith(":SearchedTask")
    assert made.task.arguments["genome"] == genome
    assert made.task.arguments["task"]["type"] == "digits"
    assert made == load_train_config(made.model_dump(mode="json"))


def test_a_trial_that_the_base_refuses_says_which_values_it_had() -> None:
    with pytest.raises(ConfigError, match=r"a trial with train.batch_size=0: train.batch_size: must be >= 1, got 0"):
        trial_config(config_of(), {"train.batch_size": 0})


def test_search_configs_are_told_from_training_configs(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml_text.write(GOOD))
    (tmp_path / "t.yaml").write_text(yaml_text.write(GOOD["base"]))
    assert is_search_source(tmp_path / "s.yaml")
    assert not is_search_source(tmp_path / "t.yaml")
    assert not is_search_source(tmp_path / "missing.yaml")


def test_the_schema_lets_a_base_be_a_path_and_an_objective_stand_alone() -> None:
    schema = search_schema()
    assert {"type": "string", "minLength": 1} in schema["properties"]["base"]["anyOf"]
    search = schema["$defs"]["SearchSection"]["properties"]
    kinds = {name: [one.get("type") for one in search[name]["anyOf"]] for name in ("start", "learn_from")}
    assert kinds == {"start": ["object", "array"], "learn_from": ["string", "array"]}
    objective = schema["$defs"]["SearchSection"]["properties"]["objective"]["anyOf"]
    assert {"$ref": "#/$defs/Objective"} in objective
    assert "array" in {form.get("type") for form in objective}


def test_the_arguments_of_a_method_are_the_keys_of_its_section_but_its_name() -> None:
    assert config_of().search.method.arguments == {"sequence": "pseudo"}


def test_a_metric_that_the_task_does_not_report_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"objective\.metric: the task has no metric 'acuracy'; did you mean"):
        config_of(objective={"metric": "acuracy"})
    for known in ("accuracy", "loss", "train_loss", "parameters", "members.0.accuracy"):
        assert config_of(objective={"metric": known}).search.objective[0].metric == known


def test_a_search_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    without = {key: value for key, value in GOOD.items() if key != "name"}
    (tmp_path / "rates of digits.yaml").write_text(yaml_text.write(without))
    assert load_search_config(tmp_path / "rates of digits.yaml").name == "rates-of-digits"
    assert load_search_config(without).name == "search"

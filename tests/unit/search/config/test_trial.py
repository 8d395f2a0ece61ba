"""A trial is trained with exactly the values that are proposed and reported."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.config.trial import trial_config
from orchestray.trainers.config.load import load_train_config
from support.search_configs import GOOD

KEYS = {
    "train.optimizer.weight_decay": 0.07,
    "train.optimizer.lr": 0.003,
    "train.lr_schedule.warmup_steps": 3,
    "train.optimizer.type": "adamw",
    "train.lr_schedule.type": "cosine",
}


def config_of(space: dict[str, Any], **base: Any) -> Any:
    source = copy.deepcopy(GOOD)
    source["search"]["space"] = space
    source["base"] |= base
    return load_search_config(source)


def values_of(config: Any, keys: Any) -> dict[str, Any]:
    """Return the values of dotted keys in a config."""
    found = {}
    for key in keys:
        place = config.model_dump(mode="json")
        for name in key.split("."):
            place = place[name]
        found[key] = place
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_values_of_a_trial_are_in_its_config_in_whatever_order_they_are_proposed(seed: int) -> None:
    order = list(KEYS)
    random.Random(seed).shuffle(order)
    config = config_of({key: {"type": "choice", "values": [KEYS[key]]} for key in order})
    made = trial_config(config, {key: KEYS[key] for key in order})
    assert values_of(made, KEYS) == KEYS


@pytest.mark.parametrize("is_first", [True, False])
def test_a_key_inside_a_section_that_is_a_choice_is_trained_with(is_first: bool) -> None:
    sections = [{"type": "sgd", "lr": 0.1, "momentum": 0.9}, {"type": "adam", "lr": 0.01}]
    space = {"train.optimizer": {"type": "choice", "values": sections}}
    inner = {"train.optimizer.lr": {"type": "log_uniform", "low": 0.001, "high": 0.5}}
    config = config_of(inner | space if is_first else space | inner)
    changes = {"train.optimizer": sections[0], "train.optimizer.lr": 0.25}
    made = trial_config(config, dict(sorted(changes.items(), reverse=is_first)))
    assert (made.train.optimizer.lr, made.train.optimizer.momentum) == (0.25, 0.9)


def test_values_of_the_base_that_are_the_defaults_of_another_type_give_way_to_those_of_the_new_one() -> None:
    made = trial_config(config_of({"train.optimizer.type": {"type": "choice", "values": ["sgd", "adamw"]}}), KEYS)
    assert made.train.optimizer.betas == (0.9, 0.999)


@pytest.mark.parametrize("options", [None, {}])
def test_several_keys_of_a_mapping_that_the_base_has_empty_are_all_in_the_trial(options: Any, tmp_path: Path) -> None:
    methods = "".join(f"\n    def {name}(self, *_): ..." for name in ("build_model", "dataset", "to_batch", "loss"))
    (tmp_path / "own.py").write_text(f"class Own:\n    def __init__(self, options): ...{methods}\n    metrics = loss\n")
    space = {f"task.options.{name}": {"type": "uniform", "low": 0.0, "high": 1.0} for name in "abc"}
    task = {"type": f"{tmp_path / 'own.py'}:Own", "options": options}
    config = config_of(space, task=task)
    made = trial_config(config, dict.fromkeys(space, 0.5))
    assert made.task.model_dump()["options"] == {"a": 0.5, "b": 0.5, "c": 0.5}
    assert not config.combinations.refused
    given = load_train_config({**GOOD["base"], "task": task}, [f"{key}=0.5" for key in space])
    assert given.task.model_dump()["options"] == made.task.model_dump()["options"]


def test_a_value_that_another_one_would_replace_is_an_error() -> None:
    space = {"train.average": {"type": "choice", "values": [None, {"type": "ema"}]}}
    with pytest.raises(
        ConfigError, match=r"train.average: the value null would not be in the config.*would replace it"
    ):
        trial_config(config_of(space), {"train.average": None, "train.average.decay": 0.9})


def test_a_key_with_a_dot_in_it_is_the_key_of_its_mapping(tmp_path: Path) -> None:
    methods = "".join(f"\n    def {name}(self, *_): ..." for name in ("build_model", "dataset", "to_batch", "loss"))
    (tmp_path / "mine.py").write_text(
        f"class Mine:\n    def __init__(self, scales): ...{methods}\n    metrics = loss\n"
    )
    task = {"type": f"{tmp_path}/mine.py:Mine", "scales": {"user.age": 1.0, "user": {"x.y": 2.0}}}
    dimension = {"type": "uniform", "low": 0.0, "high": 9.0}
    space = {"task.scales.user.age": dimension, "task.scales.user.x.y": dimension}
    config = config_of(space, task=task)
    made = trial_config(config, {"task.scales.user.age": 5.0, "task.scales.user.x.y": 3.0})
    assert made.task.arguments["scales"] == {"user.age": 5.0, "user": {"x.y": 3.0}}
    for wrong in ("task.scales.user.agee", "task.scales.users", "task.scales.user.x"):
        with pytest.raises(ConfigError, match=f"search.space.{wrong}: is no key of the base config; "):
            config_of({wrong: dimension}, task=task)

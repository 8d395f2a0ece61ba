"""Goals have a direction: by the metric's name, by the task's own list, or by the user; never by a guess."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.config import yaml_text
from orchestray.platform.config.metric_names import mode_of_metric
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.modes import GOALS, goals_text
from orchestray.trainers.tasks.registry import TASKS

METHODS = "".join(f"\n    def {name}(self, *given): ..." for name in ("build_model", "dataset", "to_batch", "loss"))
METRICS = "\n    def metrics(self, outputs, batch): return {'rmse': 1, 'closeness': 2}"


def source(folder: Path, body: str = "", text: str = "") -> dict[str, Any]:
    """Return a config of a user's task in a file, whose class has this body."""
    file = folder / "mine.py"
    file.write_text(f"{text}\nclass Mine{'(Base)' if text else ''}:{body}{METHODS}{METRICS}\n")
    train = {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}}
    return {"name": "a", "task": {"type": f"{file}:Mine"}, "train": train}


def goal_of(key: str, **given: Any) -> str:
    goal = {"metric": "closeness", **given, **({"value": 1} if key == "train.until" else {})}
    return f"{key}={{{', '.join(f'{name}: {value}' for name, value in goal.items())}}}"


@pytest.mark.parametrize("key", GOALS)
@pytest.mark.parametrize(("metric", "mode"), [("rmse", "min"), ("loss", "min")])
def test_a_known_metric_has_its_direction(tmp_path: Path, key: str, metric: str, mode: str) -> None:
    config = load_train_config(source(tmp_path), [goal_of(key, metric=metric)])
    assert goals_text(config) == f"{key} {metric} ({mode})"


@pytest.mark.parametrize("key", GOALS)
def test_an_unknown_metric_without_a_mode_is_refused_with_what_to_do(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.mode: is required, and missing: the name 'closeness' .* mode: min"):
        load_train_config(source(tmp_path), [goal_of(key)])
    assert goals_text(load_train_config(source(tmp_path), [goal_of(key, mode="min")])) == f"{key} closeness (min)"


LISTS = {
    "a tuple": ("\n    lower_is_better = ('closeness',)", ""),
    "an annotated list": ("\n    lower_is_better: list[str] = ['closeness']", ""),
    "in the constructor": ("\n    def __init__(self): self.lower_is_better = ('closeness',)", ""),
    "a base in the file": ("\n    pass", "class Base:\n    lower_is_better = ('closeness',)\n"),
}


@pytest.mark.parametrize("form", LISTS)
def test_the_list_of_the_task_is_read_without_running_it_and_stays_in_the_config(tmp_path: Path, form: str) -> None:
    given = source(tmp_path, *LISTS[form])
    file = tmp_path / "mine.py"
    file.write_text(f"{file.read_text()}\nraise SystemExit\n")
    config = load_train_config(given, [goal_of("train.until"), goal_of("checkpoint.best", metric="rmse")])
    assert goals_text(config) == "train.until closeness (min), checkpoint.best rmse (min)"
    file.write_text("")
    assert load_train_config(yaml_text.read(dump_yaml(config)), look_at_task=False) == config


def test_the_metrics_of_a_whole_validation_are_those_that_final_metrics_returns(tmp_path: Path) -> None:
    given = source(tmp_path, "\n    def final_metrics(self, totals): return {'f1': 1}")
    assert goals_text(load_train_config(given, [goal_of("train.until", metric="f1")])) == "train.until f1 (max)"


def test_what_a_list_leaves_out_is_better_when_higher(tmp_path: Path) -> None:
    given = source(tmp_path, "\n    lower_is_better = ('rmse',)")
    assert goals_text(load_train_config(given, [goal_of("train.until")])) == "train.until closeness (max)"


def test_a_list_that_the_source_does_not_show_says_nothing(tmp_path: Path) -> None:
    given = source(tmp_path, "\n    lower_is_better = tuple(x for x in ('closeness',))")
    with pytest.raises(ConfigError, match="mode: is required"):
        load_train_config(given, [goal_of("train.until")])


@pytest.mark.parametrize("name", TASKS)
def test_the_names_of_the_metrics_of_built_in_tasks_say_what_their_lists_say(name: str) -> None:
    module, _, class_name = f"{TASKS.find(name).__module__}:{TASKS.find(name).__qualname__}".partition(":")
    listed = getattr(getattr(import_module(module), class_name), "lower_is_better", ())
    assert [mode_of_metric(metric) for metric in listed] == ["min"] * len(listed)

"""Trackers by name, and users' own: what cannot work is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.trackers.base import identity_of
from orchestray.trainers.trackers.registry import TRACKERS, makers

CONFIG = {
    "name": "run",
    "task": {"type": "digits"},
    "train": {"batch_size": 2, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
}
OWN = """
import notes
class Mine:
    def start(self, config, name, resumed): notes.LINES.append(("start", name, resumed))
    def log(self, metrics, step): notes.LINES.append((step, metrics))
    def finish(self, status): notes.LINES.append(status)
"""


def test_an_unknown_tracker_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_train_config({**CONFIG, "trackers": ["mlfow", "wandb", "wandb"]})
    first, second = caught.value.problems
    assert first.startswith("config: trackers.0: there is no tracker 'mlfow'; did you mean 'mlflow'?")
    assert second == "config: trackers: wandb is there twice"


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_refused_with_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestray.trainers.trackers.registry.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"trackers: {name} needs the package .*pip install .*orchestray\[{name}\]"):
        makers([name])


def test_a_class_of_a_file_is_a_tracker_with_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "notes.py").write_text("LINES = []")
    config = load_train_config({**CONFIG, "trackers": [f"{tmp_path}/mine.py:Mine"]})
    ((_, make),) = makers(config.trackers)
    tracker: Any = make(tmp_path)
    tracker.start({}, "run", False)
    assert sys.modules[type(tracker).__module__].notes.LINES == [("start", "run", False)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (OWN.replace("metrics, step", "metrics"), r"is not a tracker: .* and log is missing or takes other arguments"),
        (OWN.replace("finish", "end"), r"is not a tracker: .* and finish is missing or takes other arguments"),
        ("class Other: ...", r"there is no class Mine in .*mine\.py; it has Other"),
        ("class Mine:\n    def __init__(self): 1 / 0", r"Mine\(\) failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_class_that_is_not_a_tracker_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "notes.py").write_text("LINES = []")
    with pytest.raises(ConfigError, match=f"config: trackers: .*{sentence}"):
        makers([f"{tmp_path}/mine.py:Mine"])


def test_the_id_of_a_run_lasts_and_is_another_for_a_later_run_of_its_name(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with RunDirectory.create(tmp_path, "run") as run:
            ids.append(identity_of(run.path))
        with RunDirectory.open_existing(tmp_path, "run") as run:
            assert identity_of(run.path) == ids[-1]
        (tmp_path / "run").rename(tmp_path / f"old-{len(ids)}")
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("name", "asked", "mode"),
    [
        ("wandb", "", "offline"),
        ("wandb", "online", "online"),
        ("wandb", "disabled", "disabled"),
        ("trackio", "", None),
    ],
)
def test_a_tracker_calls_its_package_as_that_wants_it(
    name: str, asked: str, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", asked)
    calls: list[Any] = []
    package: Any = ModuleType(name)
    package.init = lambda **options: calls.append(options) or package
    package.log = lambda metrics, step: calls.append((metrics, step))
    package.finish = lambda **options: calls.append(options)
    package.Settings = dict
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("orchestray.trainers.trackers.registry.find_spec", lambda _name: package)
    monkeypatch.delitem(sys.modules, TRACKERS[name][0].partition(":")[0], raising=False)
    with RunDirectory.create(tmp_path, "run") as run:
        ((_, make),) = makers([name])
        tracker = make(run.path)
        tracker.start({"a": 1}, "run", True)
        tracker.log({"train/loss": 0.5}, 3)
        tracker.finish("failed")
    monkeypatch.delitem(sys.modules, TRACKERS[name][0].partition(":")[0], raising=False)
    options, logged, ended = calls
    assert (options["project"], options["name"], options["config"], options["resume"]) == (
        "orchestray", "run", {"a": 1}, "allow",
    )  # fmt: skip
    assert logged == ({"train/loss": 0.5}, 3)
    assert ended == ({"exit_code": 1} if name == "wandb" else {})
    assert options.get("mode") == mode

"""A class that is given as it is gets a name that workers find, or the user learns what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import optim

from orchestray.platform.errors import ConfigError
from orchestray.platform.usercode.class_names import name_of_class
from orchestray.trainers.config.load import load_train_config

TRAIN = {"batch_size": 2, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.1}}


class OfThisFile:
    """A task, as far as this test goes."""


def test_a_class_of_a_file_is_named_by_the_file_and_an_installed_one_by_its_module() -> None:
    assert name_of_class(OfThisFile, "task.type") == f"{Path(__file__)}:OfThisFile"
    assert name_of_class(optim.NAdam, "train.optimizer.type") == "torch.optim.nadam:NAdam"


def test_a_config_takes_classes_in_place_of_their_names() -> None:
    train = {**TRAIN, "optimizer": {"type": optim.NAdam, "lr": 0.1}}
    config = load_train_config({"name": "given", "task": {"type": OfThisFile}, "train": train}, look_at_task=False)
    assert config.task.type == f"{Path(__file__)}:OfThisFile"
    assert config.train.optimizer.type == "torch.optim.nadam:NAdam"


@pytest.mark.parametrize("given", [True, False], ids=["class", "name"])
def test_a_class_of_a_notebook_is_told_to_be_written_to_a_file(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec("class InCell: pass", cell.__dict__)  # noqa: S102 - as a notebook runs a cell
    kind: Any = cell.InCell if given else "__main__:InCell"
    with pytest.raises(
        ConfigError, match=r"config: task\.type: class InCell is written in a notebook.*%%writefile task\.py"
    ):
        load_train_config({"name": "cell", "task": {"type": kind}, "train": TRAIN})


def test_a_class_inside_a_function_is_told_to_be_moved() -> None:
    class Inside:
        """A class that no name leads to."""

    with pytest.raises(ConfigError, match=r"Inside is written inside a function or a class"):
        load_train_config({"name": "inside", "task": {"type": Inside}, "train": TRAIN})

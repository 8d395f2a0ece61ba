"""Layers that a config freezes and the model does not have are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.validate.refuse import check_layout

CONFIG = Path(__file__).parents[4] / "configs" / "train" / "digits.yaml"


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        ("[0.weight, 7.*]", r"digits\.yaml: train\.freeze: no parameter has a name like '7\.\*'; there are 0\.weight"),
        ("['*']", r"digits\.yaml: train\.freeze: '\*' freeze every parameter"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_with_the_names_that_there_are(freeze: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_layout(load_train_config(CONFIG, [f"train.freeze={freeze}"]), label="digits.yaml")


def test_patterns_that_fit_and_a_task_that_cannot_be_built_here_are_taken() -> None:
    check_layout(load_train_config(CONFIG, ["train.freeze=[0.*, 2.bias]"]))
    missing = ["task={type: parquet, path: /nowhere/x.parquet, label: y}", "train.freeze=[0.*]"]
    check_layout(load_train_config(CONFIG, missing))

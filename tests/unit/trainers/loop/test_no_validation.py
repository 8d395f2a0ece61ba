"""A task without validation data is trained like any other, and what takes a validation is refused at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.data.retries import READS
from orchestray.platform.data.source import open_split
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.goals import Best, EarlyStop, Until
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.no_validation import WAYS, NoValidation
from support.training import few_digits

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one worker": ({}, {}),
    "two replicas": ({"data": 2}, {}),
    "pipeline": ({"pipeline": 2}, {}),
    "zero 3": ({"data": 2}, {"shard": "parameters"}),
    "averaging": ({"data": 2}, {"type": "averaging", "every": 2}),
    "ensemble": ({"data": 2}, {"type": "independent"}),
}
GOALS: dict[str, dict[str, Any]] = {
    "train.until": {"until": Until("accuracy", 0.9, "max")},
    "train.early_stopping": {"early_stop": EarlyStop("loss", 3, 0.0, "min")},
    "checkpoint.best": {"best": Best("loss", "min")},
}


@pytest.mark.parametrize(
    ("layout", "way"), [*((layout, "none") for layout in LAYOUTS), *(("two replicas", way) for way in WAYS[1:])]
)
def test_the_run_is_that_of_the_same_task_with_validation(layout: str, way: str) -> None:
    network, exchange = LAYOUTS[layout]
    settings = layout_settings(network, exchange, steps=4, validate_every_steps=2)
    found = train_laid_out(lambda: NoValidation(way), settings)
    wanted = train_laid_out(few_digits, settings)
    assert found.losses == wanted.losses
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
    assert found.outcome.final["validation"] is None
    assert wanted.outcome.final["validation"] is not None


@pytest.mark.parametrize(("consistency", "workers"), [("synchronous", 2), ("asynchronous", 1)])
def test_parameter_servers_order_no_validation(tmp_path: Path, consistency: str, workers: int) -> None:
    settings = central_settings(workers, {"consistency": consistency}, steps=4, validate_every_steps=2)
    found = train_central(NoValidation, settings, tmp_path)
    assert [line["step"] for line in found.lines] == [1, 2, 3, 4]
    assert found.outcome.final["validation"] is None


@pytest.mark.parametrize("goal", GOALS)
def test_a_goal_on_a_validation_is_refused_before_the_first_step(tmp_path: Path, goal: str) -> None:
    sentence = rf"config: {goal}: it takes a validation, and the task has no validation data .* take {goal} out"
    with pytest.raises(ConfigError, match=sentence):
        train_laid_out(NoValidation, replace(layout_settings({"data": 2}), **GOALS[goal]))
    with pytest.raises(ConfigError, match=sentence):
        train_central(NoValidation, replace(central_settings(1), **GOALS[goal]), tmp_path)


@pytest.mark.parametrize(("way", "num_warnings"), [("none", 0), ("empty", 1), ("not implemented", 1)])
def test_only_what_may_be_a_mistake_is_warned_of(way: str, num_warnings: int) -> None:
    texts: list[str] = []
    READS.begin(texts.append)
    assert open_split(NoValidation(way), "validation").num_rows == 0
    READS.begin(None)
    assert len(texts) == num_warnings
    assert all(text.endswith("This run does not validate") for text in texts)

"""Carrying out orders: the check of a loss by each worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from orchestray.platform.errors import TrainingError
from orchestray.platform.run.checkpoint import list_checkpoints
from orchestray.trainers.config.settings import ReplicaSettings
from support.central_run import train_central
from support.layouts import layout_settings
from support.training import Rows


class Weighed(Rows):
    """A task whose samples weigh differently, without a word on it."""

    def __init__(self) -> None:
        inputs = np.random.default_rng(0).normal(size=(40, 4))
        super().__init__(inputs, inputs.sum(1), lambda: nn.Linear(4, 1))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        weights = batch["inputs"][:, 0].exp()
        return ((outputs.reshape(-1) - batch["targets"]).square() * weights).sum() / weights.sum()


def settings(data: int = 2, exchange: dict[str, Any] | None = None, **train: Any) -> ReplicaSettings:
    server = {"type": "parameter_server", **(exchange or {})}
    return layout_settings({"data": data, "microbatches": None}, server, **train)


SHARED = {"consistency": "asynchronous", "transport": "shared_memory"}


@pytest.mark.parametrize("exchange", [{}, SHARED], ids=["channels", "shared memory"])
@pytest.mark.parametrize("train", [{}, {"accumulate": 4, "batch_size": 8}, {"batch_size": 2}], ids=str)
def test_a_loss_that_is_no_mean_is_refused_at_the_first_share(
    tmp_path: Path, train: dict[str, Any], exchange: dict[str, Any]
) -> None:
    with pytest.raises(TrainingError, match="not a mean over samples"):
        train_central(Weighed, settings(exchange=exchange, **train), tmp_path)


def test_a_loss_that_is_no_mean_is_refused_once_a_resumed_run_has_several_workers(tmp_path: Path) -> None:
    alone = replace(settings(1), checkpoint_storage=str(tmp_path / "checkpoints"), checkpoint_every_steps=3)
    train_central(Weighed, alone, tmp_path)
    [found] = list_checkpoints(tmp_path / "checkpoints")
    with pytest.raises(TrainingError, match="not a mean over samples"):
        train_central(Weighed, settings(steps=5), tmp_path, checkpoint=found)


class Noting(Rows):
    """A task that notes the step of each loss in a validation."""

    def __init__(self) -> None:
        inputs = np.random.default_rng(0).normal(size=(40, 4))
        super().__init__(inputs, inputs.sum(1), lambda: nn.Linear(4, 1))
        self.steps: list[int] = []

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], step: int) -> Tensor:  # type: ignore[override]
        if not outputs.requires_grad:
            self.steps.append(step)
        return super().loss(outputs, batch)

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("exchange", [{}, {"consistency": "asynchronous"}], ids=str)
def test_a_loss_in_a_validation_gets_the_last_step(tmp_path: Path, exchange: dict[str, Any]) -> None:
    task = Noting()
    train = {"steps": 5, "batch_size": 8, "validate_every_steps": 2, "loss_is": "between_samples"}
    train_central(lambda: task, settings(3, exchange, **train), tmp_path)
    assert {*task.steps} == {2, 4, 5}

"""The validation of an ensemble with members on different workers, and a loss that has a weight and takes the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.layouts import layout_settings, train_laid_out
from support.training import Rows

STEPS = 4


class Picky(Rows):
    """A task of which some samples do not count, and whose loss rises with the step."""

    def __init__(self) -> None:
        inputs = np.random.default_rng(0).normal(size=(40, 3))
        super().__init__(inputs, inputs.sum(1), lambda: nn.Linear(3, 1))

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["inputs"][:, 0] > 0.5).sum()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], step: int) -> Tensor:  # type: ignore[override]
        apart = (outputs.reshape(-1) - batch["targets"]).square()
        return apart[batch["inputs"][:, 0] > 0.5].mean() * step

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


# Of the batches of four some have no sample that counts.
@pytest.mark.parametrize("batch_size", [4, 7])
def test_losses_of_members_and_of_their_mean_have_the_weight_and_the_step_of_the_task_s_loss(batch_size: int) -> None:
    task = Picky()
    exchange = {"type": "independent", "average": "outputs"}
    train = {"batch_size": batch_size, "steps": STEPS, "optimizer": {"type": "sgd", "lr": 0.01}}
    found = train_laid_out(Picky, layout_settings({"data": 2, "microbatches": None}, exchange, **train))
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        outputs = [
            batch["inputs"] @ found.weights[f"members.{i}.weight"].T + found.weights[f"members.{i}.bias"]
            for i in (0, 1)
        ]
    validation = found.outcome.final["validation"]
    assert validation["loss"] == pytest.approx(float(task.loss(sum(outputs) / 2, batch, STEPS)), rel=1e-10)  # type: ignore[arg-type]
    assert [each["loss"] for each in validation["members"]] == pytest.approx(
        [float(task.loss(each, batch, STEPS)) for each in outputs], rel=1e-10
    )

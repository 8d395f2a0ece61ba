"""Assembling a worker's part of the model where its replica has no sample to try it with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional

from support.layouts import layout_settings, train_laid_out
from support.training import Rows, furthest


def rows(num_samples: int) -> Rows:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(num_samples, 6)), rng.integers(0, 5, size=num_samples)
    return Rows(inputs, targets, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))


@pytest.mark.parametrize(
    ("data", "num_samples", "accumulate"), [(3, 24, 6), (2, 1, 1)], ids=["of a micro-batch", "of an epoch"]
)
def test_a_replica_without_samples_splits_its_layers_as_the_others(
    data: int, num_samples: int, accumulate: int
) -> None:
    train = {"batch_size": 12, "accumulate": accumulate}
    plain = train_laid_out(lambda: rows(num_samples), layout_settings({"microbatches": None}, **train))
    network = {"microbatches": None, "data": data, "tensor": 2}
    split = train_laid_out(lambda: rows(num_samples), layout_settings(network, **train))
    assert furthest(split.weights, plain.weights) < 1e-12


class Changing(Rows):
    """A task whose loss changes its batch: it takes the classes out, and counts them from 0."""

    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        targets = batch.pop("targets")
        targets -= 1
        return functional.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("network", [{"pipeline": 2, "microbatches": 2}, {"data": 2, "microbatches": None}])
def test_a_loss_that_changes_its_batch_gets_each_batch_once(network: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 6)), rng.integers(1, 6, size=24)

    def task() -> Rows:
        return Changing(inputs, targets, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))

    alone = train_laid_out(task, layout_settings({"microbatches": None}, batch_size=12))
    found = train_laid_out(task, layout_settings(network, batch_size=12))
    assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    assert furthest(found.weights, alone.weights) < 1e-12

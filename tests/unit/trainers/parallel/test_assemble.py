"""Assembling a worker's part of the model where its replica has no sample to try it with."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

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

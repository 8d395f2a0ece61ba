"""The gradient noise scale of real runs."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.errors import ConfigError
from support.training import Rows, digits, regression, same_bits, train

FROZEN = {"type": "sgd", "lr": 1e-12}
"""A rate at which the weights, and so the distribution of the gradients, stay as they are."""


class Center(nn.Module):
    """A point whose squared distance from the samples is the loss: a quadratic with the samples' covariance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs - self.at.to(inputs.dtype)).square().sum(1) / 2


class Quadratic(Rows):
    """The mean of half the squared distance: the gradient of a sample is the point minus the sample."""

    def __init__(self, num_samples: int = 512, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.samples = rng.normal(size=(num_samples, 4)) * [1.0, 2.0, 3.0, 4.0] + [2.0, 0.0, 1.0, 1.0]
        super().__init__(self.samples, np.zeros(num_samples), lambda: Center(4))

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs.mean()

    def metrics(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"distance": outputs.mean()}

    @property
    def trace(self) -> float:
        return float(self.samples.var(axis=0, ddof=1).sum())

    @property
    def noise_scale(self) -> float:
        mean = self.samples.mean(axis=0)
        return self.trace / float(mean @ mean)


@pytest.mark.parametrize(("data", "accumulate"), [(4, 1), (1, 4)])
def test_the_noise_scale_of_a_quadratic_is_that_of_its_covariance(data: int, accumulate: int) -> None:
    task, options = Quadratic(), {"optimizer": FROZEN, "noise_scale": {"decay": 0.995}, "batch_size": 64}
    run = train(task, data, accumulate=accumulate, steps=250, validate_every_steps=1000, **options)[0]
    last = run.steps[-1]
    assert last["gradient_variance"] == pytest.approx(task.trace / 64, rel=0.05)
    assert last["noise_scale"] == pytest.approx(task.noise_scale, rel=0.05)
    assert last["critical_batch"] == pytest.approx(task.noise_scale, rel=0.1)


def test_workers_and_micro_batches_are_the_same_parts() -> None:
    options: dict[str, Any] = {"noise_scale": {}, "steps": 6, "batch_size": 32}
    lines = [
        [
            [step.get(key, -1.0) for key in ("noise_scale", "critical_batch", "gradient_variance")]
            for step in train(regression(), data, accumulate=accumulate, **options)[0].steps
        ]
        for data, accumulate in ((4, 1), (2, 2), (1, 4))
    ]
    np.testing.assert_allclose(lines[1], lines[0], rtol=1e-9)
    np.testing.assert_allclose(lines[2], lines[0], rtol=1e-9)


def test_every_worker_measures_the_same_bits_and_the_training_is_untouched() -> None:
    plain, watched = (train(regression(), 3, steps=5, **options) for options in ({}, {"noise_scale": {}}))
    assert all(same_bits(one.after, plain[0].after) for one in watched)
    keys = ("noise_scale", "gradient_variance")
    assert len({tuple(step.get(key) for step in one.steps for key in keys) for one in watched}) == 1
    # The norms ride along with the gradients. The last message is the result, which names what measured them.
    assert plain[0].calls[:-1] == watched[0].calls[:-1]


def test_the_variance_of_the_gradient_falls_as_one_over_the_batch() -> None:
    """Batch size to control gradient variance, first half: both what is reported and what the gradients show."""
    task, sizes = digits(), [16, 32, 64, 128, 256]
    reported, seen = [], []
    for size in sizes:
        options: dict[str, Any] = {"optimizer": {"type": "sgd", "lr": 1e-6}, "noise_scale": {"decay": 0.99}}
        options |= {"drop_last": True, "accumulate": 4, "steps": 60, "validate_every_steps": 1000}
        run = train(task, batch_size=size, **options)[0]
        reported.append(run.steps[-1]["gradient_variance"])
        states = [run.before, *run.weights]
        gradients = torch.stack(
            [torch.cat([(a[name] - b[name]).reshape(-1) for name in a]) for a, b in pairwise(states)]
        )
        seen.append(float(gradients.var(dim=0).sum()))
    for variances in (reported, seen):
        slope = np.polyfit(np.log(sizes), np.log(variances), 1)[0]
        assert slope == pytest.approx(-1.0, abs=0.1)


def test_synchronized_batch_normalisation_is_refused() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    rows = regression()
    task = Rows(rows.to_batch(rows.table)["inputs"].numpy(), rows.to_batch(rows.table)["targets"].numpy(), model)
    with pytest.raises(ConfigError, match=r"use train.batch_norm: local"):
        train(task, 2, noise_scale={})
    assert "noise_scale" in train(task, 2, noise_scale={}, batch_norm="local", steps=4)[0].steps[-1]


def test_a_step_whose_update_is_lost_with_a_worker_is_measured_once() -> None:
    """Lose a worker in the update, in which an optimizer may communicate: the gradients are measured by then."""
    options: dict[str, Any] = {"noise_scale": {}, "batch_size": 16, "accumulate": 2, "steps": 3}
    whole = train(regression(), **options)[0].replica.position.noise

    def lose_the_second(replica: Any, *_: Any) -> None:
        update, calls = replica.optimizer.step, []

        def step(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise PeerLostError("another worker is gone")
            update(*arguments)

        replica.optimizer.step = step
        with pytest.raises(PeerLostError):
            replica.run(time.time())

    again = train(regression(), prepare=lose_the_second, **options)[0].replica.position.noise
    assert again == whole

"""Training under servers in virtual time: real coordinator, real shard, gradients of a least-squares problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from orchestray.platform.data.order import window_order
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.assignments import Compute, DoneStep
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.server.dyn_sgd import Revision
from orchestray.trainers.ps.server.shard import Origin, Rates, Shard
from orchestray.trainers.ps.worker.local_steps import LocalSteps
from support.ledger_time import Simulation

NUM_SAMPLES = 120
NUM_FEATURES = 8
NOISE = 0.5


class Problem(Protocol):
    """A problem that a flat vector of weights is trained for."""

    num_samples: int
    num_features: int

    def loss(self, weights: Tensor) -> float:
        """Return the mean loss over all samples."""

    def gradient(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the mean loss of some samples."""


class LeastSquares:
    """Noisy targets of a linear function; what no model explains is about NOISE**2 / 2."""

    num_samples = NUM_SAMPLES
    num_features = NUM_FEATURES

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator, dtype=torch.float64)
        truth = torch.randn(NUM_FEATURES, generator=generator, dtype=torch.float64)
        noise = torch.randn(NUM_SAMPLES, generator=generator, dtype=torch.float64)
        self.targets = self.inputs @ truth + NOISE * noise

    def loss(self, weights: Tensor) -> float:
        """Return the mean loss over all samples."""
        return float((self.inputs @ weights - self.targets).square().mean() / 2)

    def least(self) -> float:
        """Return the smallest loss there is."""
        return self.loss(torch.linalg.lstsq(self.inputs, self.targets[:, None]).solution[:, 0])

    def gradient(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the mean loss of some samples."""
        residual = self.inputs[rows] @ weights - self.targets[rows]
        return self.inputs[rows].T @ residual / len(rows)


class VirtualTraining(Simulation):
    """A simulation whose workers compute with the parameters as they were when they got their shares."""

    def __init__(
        self,
        problem: Problem,
        seconds_of: Callable[[int], float],
        num_workers: int,
        *,
        lr: float,
        decoupled: bool = False,
        lr_scale: bool = False,
        pushes_per_update: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(seconds_of, num_workers, num_samples=problem.num_samples, **options)
        partition = Partition((("weights", (problem.num_features,)),))
        rates = Rates(lr)
        self.losses: list[float] = []
        """Over all samples, after each push."""
        self.updates_behind: list[int] = []
        """Staleness of each push, in updates of the shard."""
        self._problem = problem
        self._held: dict[int, tuple[int, Tensor]] = {}
        self._steps = LocalSteps(partition.slices(0), rates, {"type": "sgd"}, None) if decoupled else None
        self._shard = Shard(
            partition.slices(0),
            torch.zeros(problem.num_features, dtype=torch.float64),
            make_optimizer("sgd"),
            rates,
            consistency=self.coordinator.settings.consistency,
            scale_by_staleness=lr_scale,
            revision=Revision() if decoupled else None,
            pushes_per_update=pushes_per_update,
        )

    @property
    def num_updates(self) -> int:
        return self._shard.version

    @property
    def weights(self) -> Tensor:
        return self._shard.values

    def read(self, worker: int, order: Compute) -> None:
        self._held[worker] = (self._shard.version, self._shard.values.clone())

    def write(self, worker: int, order: Compute, done_steps: Sequence[DoneStep]) -> None:
        version, values = self._held.pop(worker)
        samples = torch.from_numpy(window_order([self._problem.num_samples], seed=0, epoch=order.epoch))
        rows = torch.cat([samples[start:stop] for start, stop in order.pieces])
        pushed = self._problem.gradient(values, rows) * (order.num_samples / order.batch_samples)
        if self._steps is not None:
            pushed = self._steps.change(order, pushed, values, ())
        part = Part(order.step, order.share, order.num_samples, order.batch_samples)
        self.updates_behind.append(self._shard.push(Origin(worker, (part,), version), pushed).staleness)
        for done in done_steps:
            self._shard.advance(done.step)
        self.losses.append(self._problem.loss(self._shard.values))

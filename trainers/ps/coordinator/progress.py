"""The progress of a run: complete steps, and statistics of the applied pushes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orchestray.trainers.ps.protocol.assignments import Compute, DoneStep
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings


@dataclass
class _Batch:
    """A batch that is not complete."""

    samples: int = 0
    """Number of samples applied."""
    losses: dict[int, float] = field(default_factory=dict)
    """Losses by share."""
    staleness: int = 0


@dataclass(eq=False)
class AppliedProgress:
    """A count of what the shards have applied.

    In a synchronous or stale run step c is complete when batch c and all batches before it are: its update is of those
    samples. In an asynchronous run shares of several batches arrive in any order. Step c is then complete as soon as
    the number of applied samples reaches that of the batches up to c. A share that goes beyond it counts for both
    steps, in proportion.
    """

    settings: CoordinatorSettings
    step: int
    """Number of complete steps."""
    num_samples: int
    """Number of samples applied since the start of the run."""
    num_pushes: int = 0
    """Number of shares that count."""
    dropped_copies: int = 0
    """Number of shares that a second worker computed in vain."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of pushes by their staleness: the updates between read and write."""
    samples_by_worker: Counter[int] = field(default_factory=Counter)
    _batches: dict[int, _Batch] = field(default_factory=dict)

    def add(self, worker: int, order: Compute, loss_sum: float, staleness: int) -> tuple[DoneStep, ...]:
        """Record an applied share; return the steps that it completes."""
        self.num_pushes += 1
        self.staleness[staleness] += 1
        self.samples_by_worker[worker] += order.num_samples
        if self.settings.bound is None:
            return self._add_samples(order, loss_sum, staleness)
        batch = self._batches.setdefault(order.step, _Batch())
        batch.samples += order.num_samples
        batch.losses[order.share] = loss_sum
        batch.staleness = max(batch.staleness, staleness)
        done = []
        while (batch_next := self._batches.get(self.step + 1)) is not None:
            if batch_next.samples < self.settings.batch_samples(self.step + 1):
                break
            done.append(self._complete())
        return tuple(done)

    def _add_samples(self, order: Compute, loss_sum: float, staleness: int) -> tuple[DoneStep, ...]:
        left = order.num_samples
        loss = loss_sum * order.batch_samples / order.num_samples  # the share's mean
        done = []
        while left:
            step = self.step + 1
            end = self.settings.samples_through(step)
            taken = min(left, end - self.num_samples)
            batch = self._batches.setdefault(step, _Batch())
            batch.samples += taken
            batch.losses[len(batch.losses)] = loss * taken / self.settings.batch_samples(step)
            batch.staleness = max(batch.staleness, staleness)
            self.num_samples += taken
            left -= taken
            if self.num_samples == end:
                done.append(self._complete())
        return tuple(done)

    def _complete(self) -> DoneStep:
        self.step += 1
        batch = self._batches.pop(self.step)
        return DoneStep(
            step=self.step,
            epoch=(self.step - 1) // self.settings.steps_per_epoch,
            loss=sum(
                batch.losses[share] for share in sorted(batch.losses)
            ),  # sorted: the same bits whatever the order of arrival
            batch_samples=batch.samples,
            staleness=batch.staleness,
        )

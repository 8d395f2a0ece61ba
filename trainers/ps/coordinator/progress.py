"""The progress of a run: complete steps, and statistics of the applied pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


class AppliedProgress:
    """A count of what the shards have applied.

    In a synchronous or stale run step c is complete when batch c and all batches before it are: its update is of those
    samples. In an asynchronous run shares of several batches arrive in any order. Step c is then complete as soon as
    the number of applied samples reaches that of the batches up to c. A share that goes beyond it counts for both
    steps, in proportion.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.step = settings.start_step
        """Number of complete steps."""
        self.num_pushes = 0
        """Number of shares that count."""
        self.dropped_copies = 0
        """Number of shares that a second worker computed in vain."""
        self.staleness: Counter[int] = Counter()
        """Number of pushes by their staleness: the updates between read and write."""
        self.samples_by_worker: Counter[int] = Counter()
        self._batches: dict[int, _Batch] = {}
        self._applied = settings.samples_through(settings.start_step)
        """Number of samples applied since the start of the run."""

    def add(self, worker: int, order: Compute, loss_sum: float, staleness: int) -> tuple[DoneStep, ...]:
        """Record an applied share; return the steps that it completes."""
        self.num_pushes += 1
        self.staleness[staleness] += 1
        self.samples_by_worker[worker] += order.num_samples
        if self._settings.bound is None:
            return self._add_samples(order, loss_sum, staleness)
        batch = self._batches.setdefault(order.step, _Batch())
        batch.samples += order.num_samples
        batch.losses[order.share] = loss_sum
        batch.staleness = max(batch.staleness, staleness)
        done = []
        while (batch_next := self._batches.get(self.step + 1)) is not None:
            if batch_next.samples < self._settings.batch_samples(self.step + 1):
                break
            done.append(self._complete())
        return tuple(done)

    def _add_samples(self, order: Compute, loss_sum: float, staleness: int) -> tuple[DoneStep, ...]:
        left = order.num_samples
        loss = loss_sum * order.batch_samples / order.num_samples  # the share's mean
        done = []
        while left:
            step = self.step + 1
            end = self._settings.samples_through(step)
            taken = min(left, end - self._applied)
            batch = self._batches.setdefault(step, _Batch())
            batch.samples += taken
            batch.losses[len(batch.losses)] = loss * taken / self._settings.batch_samples(step)
            batch.staleness = max(batch.staleness, staleness)
            self._applied += taken
            left -= taken
            if self._applied == end:
                done.append(self._complete())
        return tuple(done)

    def _complete(self) -> DoneStep:
        self.step += 1
        batch = self._batches.pop(self.step)
        return DoneStep(
            step=self.step,
            epoch=(self.step - 1) // self._settings.steps_per_epoch,
            loss=sum(
                batch.losses[share] for share in sorted(batch.losses)
            ),  # sorted: the same bits whatever the order of arrival
            batch_samples=batch.samples,
            staleness=batch.staleness,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "applied": self._applied,
            "num_pushes": self.num_pushes,
            "dropped_copies": self.dropped_copies,
            "staleness": [list(item) for item in sorted(self.staleness.items())],
            "samples_by_worker": [list(item) for item in sorted(self.samples_by_worker.items())],
            "batches": [
                [step, batch.samples, [list(item) for item in sorted(batch.losses.items())], batch.staleness]
                for step, batch in self._batches.items()
            ],
        }

    @staticmethod
    def from_json(settings: CoordinatorSettings, value: Mapping[str, Any]) -> AppliedProgress:
        progress = AppliedProgress(settings)
        progress.step, progress._applied = value["step"], value["applied"]
        progress.num_pushes, progress.dropped_copies = value["num_pushes"], value["dropped_copies"]
        progress.staleness = Counter(dict(value["staleness"]))
        progress.samples_by_worker = Counter(dict(value["samples_by_worker"]))
        progress._batches = {
            step: _Batch(samples, dict(losses), staleness) for step, samples, losses, staleness in value["batches"]
        }
        return progress

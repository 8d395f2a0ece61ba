"""The position of each batch in the epochs of a run whose batches may grow; pure arithmetic, without any data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Consecutive batches of one size in one epoch."""

    epoch: int
    """Number of the epoch, from 0."""
    first: int
    """Position of its first sample in the epoch."""
    batch_size: int
    """Samples of a batch; the last one of an epoch may be short."""
    start_step: int
    """Number of steps before it."""
    end_step: int
    """Number of steps up to its end."""

    def first_after(self, step: int) -> int:
        """Return the position in the epoch of the batch after `step` steps, which are in this part."""
        return self.first + (step - self.start_step) * self.batch_size


class BatchPlan:
    """A plan of the samples of each batch: every sample once an epoch, in the order of the epoch.

    It depends on the sizes alone. So any number of workers, a restart and a resume see the same batches.
    """

    def __init__(self, num_samples: int, batch_size: int, changes: Sequence[Sequence[int]] = ()) -> None:
        """
        Args:
            num_samples: samples of an epoch, at least 1.
            batch_size: samples of a batch at the start.
            changes: pairs of a number of steps, at least 1, and the size of the batches after them; in order.
        """
        self.num_samples = num_samples
        self._parts: list[Part] = []
        """The first part of each size."""
        part = self._part(0, 0, batch_size, 0)
        self._ends: list[float] = []
        for step, size in changes:
            self._parts.append(part)
            self._ends.append(step)
            last = self._within(part, step)
            first = last.first_after(step)
            part = self._part(last.epoch, first, size, step)
        self._parts.append(part)
        self._ends.append(float("inf"))

    def part_at(self, step: int) -> Part:
        """Return the part of the batch after `step` steps."""
        index = next(index for index, end in enumerate(self._ends) if step < end)
        part, end = self._within(self._parts[index], step), self._ends[index]
        if part.end_step <= end:
            return part
        return Part(part.epoch, part.first, part.batch_size, part.start_step, int(end))

    def is_epoch_end(self, step: int) -> bool:
        """Return True if an epoch ends with step `step`, counted from 1."""
        part = self.part_at(step)
        return step > 0 and part.first_after(step) == 0

    def samples_before(self, step: int) -> int:
        """Return the number of samples that the first `step` steps use."""
        part = self.part_at(step)
        return part.epoch * self.num_samples + part.first_after(step)

    def epochs_before(self, step: int) -> float:
        """Return the number of epochs that the first `step` steps are; an epoch's batches of one size count alike."""
        if len(self._parts) > 1:
            return self.samples_before(step) / self.num_samples
        return step / self._steps_from(0, self._parts[0].batch_size)

    def num_steps(self, epochs: int) -> int:
        """Return the number of steps of some epochs."""
        for part, end in zip(self._parts, self._ends, strict=True):
            if epochs <= part.epoch:  # an epoch that ends with a change
                return part.start_step
            full = self._steps_from(0, part.batch_size)
            step = part.end_step + (epochs - part.epoch - 1) * full
            if step <= end:
                return step
        raise AssertionError("the last size has no end")

    def _within(self, part: Part, step: int) -> Part:
        """Return the part of the batch after `step` steps, if the size stays that of `part`."""
        if step < part.end_step:
            return part
        full = self._steps_from(0, part.batch_size)
        epochs = (step - part.end_step) // full
        return self._part(part.epoch + 1 + epochs, 0, part.batch_size, part.end_step + epochs * full)

    def _part(self, epoch: int, first: int, batch_size: int, step: int) -> Part:
        return Part(epoch, first, batch_size, step, step + self._steps_from(first, batch_size))

    def _steps_from(self, first: int, batch_size: int) -> int:
        return -(-(self.num_samples - first) // batch_size)

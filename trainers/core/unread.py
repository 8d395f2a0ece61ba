"""Numbers that stay on a device until the steps that made them are over, so that reading them stops nothing.

To read a number of a GPU, the CPU waits for all that the GPU has been given, and meanwhile gives it nothing more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.data.stream import MicroBatch

_KEPT_STEPS = 2
"""Steps whose batches are kept for an error's text: one is under way when the one before it is read."""


class Arriving:
    """Numbers on their way from a device to the host, behind the work that the device has been given so far."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        """Start the copy of tensors of one element each, at least one, all on one device."""
        numbers = torch.stack([value.detach().double().reshape(()) for value in values])
        self._host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=numbers.is_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._event = None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """Return the numbers; wait for the copy, but not for what the device was given after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def read_together(values: Sequence[float | Tensor]) -> list[float]:
    """Return numbers of which some are on a device; these are read at once."""
    unread = [value for value in values if isinstance(value, Tensor)]
    read = iter(Arriving(unread).read() if unread else ())
    return [next(read) if isinstance(value, Tensor) else value for value in values]


class UnreadLosses:
    """The losses of the micro-batches of the last steps, of which only the sum is read if all is well."""

    def __init__(self, text: Callable[[float, MicroBatch, int, int], str]) -> None:
        """
        Args:
            text: returns the error's text of a loss, given its value, micro-batch, step and rank.
        """
        self._text = text
        self._kept: dict[int, list[tuple[Tensor, MicroBatch, int]]] = {}

    def keep(self, loss: Tensor, micro_batch: MicroBatch, step: int, rank: int) -> Tensor:
        """Keep a micro-batch's loss for `refuse`, and return it in double precision."""
        value: Tensor = loss.detach().double()
        if step not in self._kept:
            self._kept = {number: kept for number, kept in self._kept.items() if 0 < step - number < _KEPT_STEPS}
        self._kept.setdefault(step, []).append((value, micro_batch, rank))
        return value

    def refuse(self, step: int) -> None:
        """Raise the error of the first loss of a step that is not finite, if its micro-batches are kept.

        Raises:
            TrainingError: there is one.
        """
        for loss, micro_batch, rank in self._kept.get(step, ()):
            if not math.isfinite(value := float(loss)):
                raise TrainingError(self._text(value, micro_batch, step, rank))

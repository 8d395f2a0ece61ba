"""Exact sums of a few numbers inside an all-reduce of floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

_PIECES = {torch.float32: 3, torch.float64: 1}
"""Number of floats that hold the 53 bits of a double: 24 + 24 + 5, or 53."""


class ExactSums:
    """Flags and doubles of every rank, in separate slots of a tensor that is summed over the ranks.

    A sum with zeros is exact, so every rank reads what each of the others wrote. It adds these up in rank order, in
    double precision. The sums are as exact as in one process, and the same bits on every rank. A flag is set if any
    rank set it. A double beyond the range of float32 becomes an infinity in a float32 tensor.
    """

    def __init__(self, num_flags: int, num_values: int, rank: int, size: int) -> None:
        self._num_flags = num_flags
        self._num_values = num_values
        self._rank = rank
        self._size = size
        self._slots: Tensor = torch.empty(0)

    def num_slots(self, dtype: torch.dtype) -> int:
        """Return how many elements of `dtype` (float32 or float64) are needed."""
        return self._num_flags + self._size * self._num_values * _PIECES[dtype]

    def use(self, slots: Tensor) -> None:
        """Write to and read from `slots`, shape `[num_slots]`."""
        self._slots = slots

    def write(self, flags: Sequence[bool], values: Sequence[float | Tensor]) -> None:
        """Write this rank's flags and values into its slots, and zeros into the other ranks'.

        A value that is a tensor of the slots' device is not read by the CPU.
        """
        pieces = _PIECES[self._slots.dtype]
        numbers = [float(flag) for flag in flags]
        numbers += [0.0] * (self._size * self._num_values * pieces)
        start = self._num_flags + self._rank * self._num_values * pieces
        unread: list[tuple[int, Tensor]] = []
        for index, value in enumerate(values):
            place = start + index * pieces
            if isinstance(value, Tensor) and value.device == self._slots.device:
                unread.append((place, value))
            else:
                numbers[place : place + pieces] = _split(float(value), pieces)
        host = torch.tensor(numbers, dtype=self._slots.dtype, pin_memory=self._slots.is_cuda)
        self._slots.copy_(host, non_blocking=True)
        for place, value in unread:
            self._slots[place : place + pieces] = _split_there(value, pieces)

    def read(self) -> tuple[list[bool], list[float]]:
        """Return, after the reduction, each flag, True if any rank had set it, and the sum of each value."""
        flags: list[bool] = (self._slots[: self._num_flags] > 0).tolist()
        table = self._slots[self._num_flags :].cpu().double().view(self._size, self._num_values, -1)
        sums = torch.zeros(self._num_values, dtype=torch.float64)
        for row in table:
            sums += row.flip(-1).sum(-1)  # the small pieces first
        return flags, sums.tolist()


def _split(value: float, pieces: int) -> list[float]:
    """Split `value` into that many float32 that sum to it (one piece: unchanged)."""
    if pieces == 1:
        return [value]
    parts: list[float] = []
    for _ in range(pieces):
        part = c_float(value).value
        parts.append(part)
        value = value - part if math.isfinite(part) else 0.0
    return parts


def _split_there(value: Tensor, pieces: int) -> Tensor:
    """Split a number like `_split`, on its device: shape `[pieces]`."""
    rest = value.double()
    if pieces == 1:
        return rest.reshape(1)
    parts: list[Tensor] = []
    for _ in range(pieces):
        part = rest.float()
        parts.append(part)
        rest = torch.where(part.isfinite(), rest - part.double(), 0.0)
    return torch.stack(parts)

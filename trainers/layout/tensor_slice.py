"""The part of a plain tensor that a worker holds: pure arithmetic on indices.

A tensor of the plain model (the model in one process) is cut along any of its dimensions. Of each dimension, a worker
holds the indices of a few ranges, one after the other. Cuts compose: a layer split over the tensor axis may be split
again over the data axis (ZeRO). The piece still records which elements of the plain tensor it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch import cat as concatenate

from orchestray.platform.data.even_split import split_evenly

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges (start, stop) of indices, in the order in which they are held."""


@dataclass(frozen=True)
class TensorSlice:
    """The part of the plain tensor `name` that a worker holds."""

    name: str
    """Name in the plain model's `state_dict`; the first of its names for a tied tensor."""
    shape: tuple[int, ...]
    """Shape of the plain tensor."""
    ranges: tuple[Ranges, ...]
    """Held indices of each dimension."""
    is_counted: bool = True
    """True if, of all holders of these elements, this worker counts them (in norms) and saves them."""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], *, is_counted: bool = True) -> TensorSlice:
        return cls(name, tuple(shape), tuple(((0, size),) for size in shape), is_counted)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    def narrow(self, dim: int, *local: tuple[int, int]) -> TensorSlice:
        """Return the part of this piece at the given ranges of dimension `dim`, as local indices of the piece."""
        held = self.ranges[dim]
        chosen: list[tuple[int, int]] = []
        for start, stop in local:
            chosen += _within(held, start, stop)
        ranges = (*self.ranges[:dim], tuple(chosen), *self.ranges[dim + 1 :])
        return replace(self, ranges=ranges)

    def chunk(self, dim: int, index: int, count: int) -> TensorSlice:
        """Return part `index` of `count` along `dim`; sizes differ by at most one, the larger ones first."""
        return self.narrow(dim, split_evenly(self.local_shape[dim], count)[index])

    def counted(self, is_counted: bool) -> TensorSlice:
        return replace(self, is_counted=self.is_counted and is_counted)

    def take(self, plain: Tensor) -> Tensor:
        """Return the worker's part of the plain tensor: contiguous, with memory of its own."""
        held = plain.detach()
        for dim, ranges in enumerate(self.ranges):
            if ranges != ((0, held.shape[dim]),):
                parts = [held.narrow(dim, start, stop - start) for start, stop in ranges]
                held = concatenate(parts, dim) if parts else held.narrow(dim, 0, 0)
        return held.contiguous().clone() if held.data_ptr() == plain.data_ptr() else held.contiguous()

    def put(self, plain: Tensor, held: Tensor) -> None:
        """Write the worker's part to its position in the plain tensor."""
        self._put(plain.detach(), held.detach(), 0)

    def _put(self, plain: Tensor, held: Tensor, dim: int) -> None:
        if dim == len(self.ranges):
            plain.copy_(held)
            return
        taken = 0
        for start, stop in self.ranges[dim]:
            size = stop - start
            self._put(plain.narrow(dim, start, size), held.narrow(dim, taken, size), dim + 1)
            taken += size


def _within(held: Ranges, start: int, stop: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    before = 0
    for first, last in held:
        size = last - first
        a, b = max(start - before, 0), min(stop - before, size)
        if a < b:
            found.append((first + a, first + b))
        before += size
    return found

"""The largest values of each tensor: relative sparsification.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017), section 3; Stich, Cordonnier and
Jaggi, "Sparsified SGD with Memory" (2018), section 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.largest import largest


class TopK(SparseCompressor):
    """Sends exactly ceil(ratio * n) values of each tensor of n values, the largest in absolute value.

    Args:
        ratio: fraction of the values to send, above 0, at most 1.
        error_feedback: True to keep unsent values for the next message.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True, **common: Any) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._ratio = ratio

    def _select(self, flat: Tensor, step: int) -> Tensor:
        sizes = self._sizes
        counts = [num_sent(size, self._ratio) for size in sizes]
        return largest_of_each(flat, sizes, counts, self._generator(step))


def num_sent(size: int, ratio: float) -> int:
    """Return how many of `size` values are sent: ceil(ratio * size)."""
    return min(size, math.ceil(ratio * size - 1e-9))  # 0.07 * 100 is a little above 7


def largest_of_each(flat: Tensor, sizes: list[int], counts: list[int], generator: torch.Generator) -> Tensor:
    """Return the indices in `flat`, ascending, of the `counts[i]` largest absolute values of its i-th part."""
    places, start = [], 0
    for size, count in zip(sizes, counts, strict=True):
        if count:
            places.append(largest(flat[start : start + size], count, generator) + start)
        start += size
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=flat.device)

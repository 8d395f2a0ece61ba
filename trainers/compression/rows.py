"""Tensors in rows of equal width, each starting a new row: buckets of values that share a scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import parts_of


class Rows:
    """The mapping between tensors concatenated in a flat vector and rows of equal width.

    Args:
        sizes: number of elements of each tensor.
        width: width of a row; the last row of each tensor is padded.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        self.width = width
        self.num_rows = sum(rows_of(size, width) for size in sizes)
        self._sizes = list(sizes)
        self._filled = [rows_of(size, width) * width for size in sizes]
        self._is_flat = self._filled[:-1] == self._sizes[:-1]
        """True if only the last row needs padding."""

    def spread(self, flat: Tensor) -> Tensor:
        """Return a new [num_rows, width] tensor of the flat vector's values, padded with zeros."""
        rows = flat.new_empty(self.num_rows * self.width)
        if self._is_flat:
            rows[: flat.numel()] = flat
            rows[flat.numel() :] = 0
        else:
            filling = flat.new_zeros(self.width)
            parts = zip(parts_of(flat, self._sizes), self._sizes, self._filled, strict=True)
            torch.cat([piece for part, n, m in parts for piece in (part, filling[: m - n])], out=rows)
        return rows.view(self.num_rows, self.width)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the flat vector of rows laid out by `spread`; of any type, and possibly a view."""
        flat = rows.reshape(-1)
        if self._is_flat:
            return flat[: sum(self._sizes)]
        parts = zip(parts_of(flat, self._filled), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def rows_of(size: int, width: int) -> int:
    """Return the number of rows of a tensor of `size` elements."""
    return -(-size // width)

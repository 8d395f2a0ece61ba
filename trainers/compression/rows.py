"""Tensors in rows of equal width, each tensor beginning a row of its own: buckets of values that share a scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import parts_of


class Rows:
    """Where tensors that lie side by side in a flat vector lie in rows.

    Args:
        sizes: elements of each tensor.
        width: of a row; the last row of each tensor is filled up.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        self.width = width
        self.num_rows = sum(rows_of(size, width) for size in sizes)
        self._sizes = list(sizes)
        self._filled = [rows_of(size, width) * width for size in sizes]
        self._is_flat = self._filled[:-1] == self._sizes[:-1]
        """Whether only the last row has to be filled up."""

    def spread(self, flat: Tensor) -> Tensor:
        """A new [num_rows, width] of the flat vector's values, zeros where rows are filled up."""
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
        """The flat vector of what `spread` laid out; of any type, maybe a view."""
        flat = rows.reshape(-1)
        if self._is_flat:
            return flat[: sum(self._sizes)]
        parts = zip(parts_of(flat, self._filled), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def rows_of(size: int, width: int) -> int:
    """Rows that a tensor of `size` elements takes."""
    return -(-size // width)

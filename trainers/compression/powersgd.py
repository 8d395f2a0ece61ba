"""PowerSGD as a code from one worker to another: each matrix as the product of two thin ones.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019),
algorithm 1 for one worker: a step of subspace iteration, begun where the last one ended. The all-reduce of the factors
in place of the gradient, which that algorithm is made for, is an exchange's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, parts_of


class PowerSgd(Compressor):
    """Sends P [rows, rank] with orthonormal columns and Q [columns, rank] for P Q^T; what is not longer than both, raw.

    A tensor of more than two dimensions is a matrix with a row for each index of the first.

    Args:
        rank: columns of the thin matrices (fewer where the matrix has fewer rows or columns).
        error_feedback: add what was lost to the next message; without it training does not reach its aim.
    """

    def __init__(self, rank: int = 2, error_feedback: bool = True, **who: Any) -> None:
        super().__init__(error_feedback=error_feedback, **who)
        self._rank = rank
        self._right = torch.empty(0)
        """Q of every matrix, side by side: where the next step's iteration begins."""
        self._shapes: list[tuple[int, int, int]] = []

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "right": self._right}

    def _start(self) -> None:
        self._shapes = [_thin(shape, self._rank) for shape in self._coded_shapes]
        num_values = sum(columns * rank for _, columns, rank in self._shapes)
        # Anything but orthogonal to the gradient will do, and every worker may have the same.
        generator = torch.Generator(self._flat.device).manual_seed(self._seed % 2**63)
        self._right = self._flat.new_empty(num_values).normal_(generator=generator)

    def _coded_bytes(self, shape: torch.Size) -> float:
        if len(shape) < 2 or not shape.numel():
            return shape.numel() * self.value_bytes
        rows, columns, rank = _thin(shape, self._rank)
        return (rows + columns) * rank * self.value_bytes

    def _fixed_bytes(self) -> int:
        return sum((rows + columns) * rank for rows, columns, rank in self._shapes) * self.value_bytes

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        factors = []
        parts = parts_of(flat, self._coded_sizes)
        for part, start, (rows, columns, _) in zip(parts, self._rights(), self._shapes, strict=True):
            matrix = part.view(rows, columns)
            left = orthonormal(matrix @ start)
            right = matrix.T @ left
            factors += [left.reshape(-1), right.reshape(-1)]
            start.copy_(torch.where(right.any(), right, start))  # a gradient of zeros leads nowhere
        return as_bytes(torch.cat(factors))

    def _decode(self, message: Tensor) -> Tensor:
        factors = from_bytes(message, self._flat.dtype)
        flat = factors.new_empty(self._num_coded_values)
        start = 0
        for part, (rows, columns, rank) in zip(parts_of(flat, self._coded_sizes), self._shapes, strict=True):
            both = factors[start : start + (rows + columns) * rank]
            left, right = parts_of(both, [rows * rank, columns * rank])
            torch.mm(left.view(rows, rank), right.view(columns, rank).T, out=part.view(rows, columns))
            start += (rows + columns) * rank
        return flat

    def _rights(self) -> list[Tensor]:
        sizes = [columns * rank for _, columns, rank in self._shapes]
        parts = zip(parts_of(self._right, sizes), self._shapes, strict=True)
        return [part.view(columns, rank) for part, (_, columns, rank) in parts]


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span at least those of `matrix` [rows, columns], rows >= columns.

    By Householder's QR, so that columns which depend on one another, or are zeros, give orthonormal ones all the same.
    """
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _thin(shape: torch.Size, rank: int) -> tuple[int, int, int]:
    """Rows, columns and rank of a tensor as a matrix."""
    rows = shape[0]
    columns = shape.numel() // rows
    return rows, columns, min(rank, rows, columns)

"""PowerSGD for a message from one worker to another: each matrix as the product of two thin ones.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019),
algorithm 1 for one worker: a step of subspace iteration that starts from the last result. The all-reduce of the factors
instead of the gradient, which that algorithm is designed for, is in an exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, parts_of


class PowerSgd(Compressor):
    """Sends P [rows, rank] with orthonormal columns and Q [columns, rank] for P Q^T.

    Tensors that would not become smaller are sent uncompressed. A tensor of more than two dimensions is a matrix with a
    row for each index of the first dimension.

    Args:
        rank: columns of the thin matrices; at most the rows and columns of the matrix.
        error_feedback: True to add what a message loses to the next message; training does not converge without it.
    """

    def __init__(self, rank: int = 2, error_feedback: bool = True, **common: Any) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._rank = rank
        self._right = torch.empty(0)
        """Concatenated Q of all matrices, the start of the next step's iteration."""
        self._shapes: list[tuple[int, int, int]] = []

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "right": self._right}

    def _start(self) -> None:
        self._shapes = [_thin(shape, self._rank) for shape in self._coded_shapes]
        num_values = sum(columns * rank for _, columns, rank in self._shapes)
        # Any start that is not orthogonal to the gradient works, and every worker may have the same.
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
            start.copy_(torch.where(right.any(), right, start))  # a zero gradient would end the iteration
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
    """Return orthonormal columns that span at least those of `matrix` [rows, columns], rows >= columns.

    Householder's QR yields orthonormal columns even if those of the matrix are linearly dependent or zero.
    """
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _thin(shape: torch.Size, rank: int) -> tuple[int, int, int]:
    """Return rows, columns and rank of a tensor as a matrix."""
    rows = shape[0]
    columns = shape.numel() // rows
    return rows, columns, min(rank, rows, columns)

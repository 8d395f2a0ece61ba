"""PowerSGD: each gradient matrix as the product of two thin ones, which can be summed in an all-reduce.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS
2019), algorithms 1 and 2: one step of power iteration, started from the last step's result (warm start), with error
feedback. Both factors are linear in the gradients, so each is all-reduced directly: bytes do not grow with the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients


@dataclass
class _Matrix:
    """A parameter whose gradient is sent as two factors."""

    index: int
    """Index of the parameter."""
    rows: int
    columns: int
    q: Tensor
    """Right factor of the last sum, `[columns, rank]`; at first random."""
    residual: Tensor
    """Residual, `[rows, columns]`."""


class PowerSgd(CombinedGradients):
    """The sum of the replicas' gradients, each matrix as P Q^T of a given rank, unless the factors are not smaller.

    With error feedback a replica adds to the next gradient what its own factors lost, M - P (P^T M) (algorithm 2). The
    sum of what all steps gave the optimizers, and of all replicas' residuals, is the sum of all gradients.

    With K replicas a step sends, from each, 2(K-1)/K times the bytes of the raw tensors and of (rows + columns) rank
    values a matrix.

    Args:
        rank: columns of the factors; fewer if a matrix has fewer rows or columns.
        error_feedback: True to add what was lost in one step to what is sent in the next.
        seed: seed of the run, for the first right factors, the same on every replica.
    """

    remembers = True

    def __init__(self, rank: int = 2, *, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__()
        self._rank = rank
        self._error_feedback = error_feedback
        self._seed = seed
        self._matrices: list[_Matrix] = []
        self._raw: list[int] = []
        """Indices of the other parameters."""

    def prepare(self, model: nn.Module) -> None:
        self._matrices, self._raw = [], []
        for index, parameter in enumerate(self._parameters):
            if (matrix := self._matrix(index, parameter)) is not None:
                self._matrices.append(matrix)
            else:
                self._raw.append(index)

    def _matrix(self, index: int, parameter: Tensor) -> _Matrix | None:
        """Return a parameter as a matrix of its first dimension by the others; None if its factors are not smaller."""
        if parameter.dim() < 2 or parameter.numel() == 0:
            return None
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        rank = min(self._rank, rows, columns)
        if (rows + columns) * rank >= rows * columns:
            return None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        seed = np.random.SeedSequence([self._seed % 2**64, index]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seed[0]))
        q = torch.randn(columns, rank, dtype=torch.float64, generator=generator)
        residual = torch.zeros(rows, columns, dtype=dtype, device=parameter.device)
        return _Matrix(index, rows, columns, q.to(residual), residual)

    def detach(self) -> None:
        super().detach()
        self._matrices, self._raw = [], []
        self.step_metrics = {"compression_error": 0.0}

    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        combined = list(gradients)
        for matrix in self._matrices:
            matrix.residual += gradients[matrix.index].reshape(matrix.rows, matrix.columns)
        lefts = [matrix.residual @ matrix.q for matrix in self._matrices]
        raw, sums = self._summed([[gradients[index] for index in self._raw], lefts])
        for index, gradient in zip(self._raw, raw, strict=True):
            combined[index] = gradient
        # QR gives orthonormal columns even if a sum has a lower rank.
        bases = [torch.linalg.qr(left).Q for left in sums]
        own = [matrix.residual.T @ basis for matrix, basis in zip(self._matrices, bases, strict=True)]
        (rights,) = self._summed([own])
        for matrix, basis, mine, right in zip(self._matrices, bases, own, rights, strict=True):
            matrix.q = torch.where(right.any(0), right, matrix.q)  # a zero gradient would end the iteration
            if self._error_feedback:
                matrix.residual -= basis @ mine.T
            else:
                matrix.residual.zero_()
            like = gradients[matrix.index]
            combined[matrix.index] = (basis @ right.T).view(like.shape).to(like.dtype)
        squares = (float(matrix.residual.square().sum()) for matrix in self._matrices)
        self.step_metrics = {"compression_error": sum(squares) ** 0.5}
        return combined

    def _summed(self, lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return the sums over the replicas of lists of tensors, in one all-reduce for each type."""
        every = [tensor for tensors in lists for tensor in tensors]
        totals: list[Tensor] = list(every)
        for dtype in dict.fromkeys(tensor.dtype for tensor in every):
            chosen = [place for place, tensor in enumerate(every) if tensor.dtype == dtype]
            same = [every[place] for place in chosen]
            flat = flatten(same)
            self.joined().all_reduce(flat)
            for place, total in zip(chosen, unflatten(flat, same), strict=True):
                totals[place] = total
        result = []
        for tensors in lists:
            result.append(totals[: len(tensors)])
            totals = totals[len(tensors) :]
        return result

    def kept(self) -> dict[str, list[Tensor | None]]:
        residuals: list[Tensor | None] = [None] * len(self._updates)
        factors: list[Tensor | None] = [None] * len(self._updates)
        for matrix in self._matrices:
            update = self._updates[matrix.index]
            if self._error_feedback:
                residuals[matrix.index] = matrix.residual.view(update.tensor.shape)
            # Only a tensor of the parameter's shape can be a slice of a plain tensor; the factor is the smaller one.
            factors[matrix.index] = matrix.q if update.piece.is_whole else _within(matrix.q, update.tensor.shape)
        return {"residual": residuals, "factor": factors}

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        for matrix in self._matrices:
            residual, factor = kept["residual"][matrix.index], kept["factor"][matrix.index]
            if residual is not None:
                matrix.residual.copy_(residual.reshape(matrix.rows, matrix.columns))
            if factor is not None:
                matrix.q.copy_(factor.reshape(-1)[: matrix.q.numel()].view(matrix.q.shape))


def _within(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of that shape that begins with the elements of a smaller one."""
    room = tensor.new_zeros(shape.numel())
    room[: tensor.numel()] = tensor.reshape(-1)
    return room.view(shape)

"""PowerSGD: each gradient matrix as the product of two thin ones, which can be summed on the way.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS
2019), algorithms 1 and 2: one step of power iteration, begun where the last step ended (warm start), with error
feedback. Both factors are linear in the gradients, so each is all-reduced as it is: bytes do not grow with the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.trainers.exchange.lockstep import LockStep, flatten, unflatten


@dataclass
class _Matrix:
    """A parameter whose gradient is sent as two factors."""

    index: int
    """Of the parameter."""
    rows: int
    columns: int
    q: Tensor
    """The right factor of the last sum, `[columns, rank]`; at first random."""
    residual: Tensor
    """What is still owed, `[rows, columns]`."""


class PowerSgd(LockStep):
    """The sum of the replicas' gradients, each matrix as P Q^T of a given rank; what is no larger so, as it is.

    With error feedback what a replica adds to the next gradient is what its own factors lost, M - P (P^T M) (algorithm
    2): the sum of what all steps gave the optimizers, and of all replicas' residuals, is the sum of all gradients.

    Bytes of a step and replica: 2(K-1)/K times those of the raw tensors and of (rows + columns) rank values a matrix,
    with K replicas.

    Args:
        rank: columns of the factors; fewer where a matrix has fewer rows or columns.
        error_feedback: add what was lost in one step to what is sent in the next.
        seed: of the run, for the first right factors, the same on every replica.
    """

    remembers = True

    def __init__(self, rank: int = 2, *, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__()
        self._rank = rank
        self._error_feedback = error_feedback
        self._seed = seed
        self._matrices: list[_Matrix] = []
        self._raw: list[int] = []
        """The other parameters."""

    def prepare(self, model: nn.Module) -> None:
        self._matrices, self._raw = [], []
        for index, parameter in enumerate(self._parameters):
            if (matrix := self._matrix(index, parameter)) is not None:
                self._matrices.append(matrix)
            else:
                self._raw.append(index)

    def _matrix(self, index: int, parameter: Tensor) -> _Matrix | None:
        """A parameter as a matrix of its first dimension by the others; None if factors are no smaller."""
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

    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        combined = list(gradients)
        for matrix in self._matrices:
            matrix.residual += gradients[matrix.index].reshape(matrix.rows, matrix.columns)
        lefts = [matrix.residual @ matrix.q for matrix in self._matrices]
        raw, sums = self._summed([[gradients[index] for index in self._raw], lefts])
        for index, gradient in zip(self._raw, raw, strict=True):
            combined[index] = gradient
        # Orthonormal also where a sum has fewer dimensions than columns.
        bases = [torch.linalg.qr(left).Q for left in sums]
        own = [matrix.residual.T @ basis for matrix, basis in zip(self._matrices, bases, strict=True)]
        (rights,) = self._summed([own])
        for matrix, basis, mine, right in zip(self._matrices, bases, own, rights, strict=True):
            matrix.q = right.clone()
            if self._error_feedback:
                matrix.residual -= basis @ mine.T
            else:
                matrix.residual.zero_()
            like = gradients[matrix.index]
            combined[matrix.index] = (basis @ right.T).view(like.shape).to(like.dtype)
        return combined

    def _summed(self, lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The sums over the replicas of lists of tensors, in one all-reduce for each type."""
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
            # Only what has a parameter's shape has a place in a plain tensor; the factor is the smaller of the two.
            factors[matrix.index] = matrix.q if update.piece.is_whole else _within(matrix.q, update.tensor.shape)
        return {"residual": residuals, "factor": factors}

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        for matrix in self._matrices:
            residual, factor = kept["residual"][matrix.index], kept["factor"][matrix.index]
            if residual is not None:
                matrix.residual.copy_(residual.reshape(matrix.rows, matrix.columns))
            if factor is not None:
                matrix.q.copy_(factor.reshape(-1)[: matrix.q.numel()].view(matrix.q.shape))

    def report(self) -> dict[str, float]:
        return {"compression_error": sum(float(m.residual.square().sum()) for m in self._matrices) ** 0.5}


def _within(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The elements of a tensor at the beginning of one of a larger shape."""
    room = tensor.new_zeros(shape.numel())
    room[: tensor.numel()] = tensor.reshape(-1)
    return room.view(shape)

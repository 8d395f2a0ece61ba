"""Matrices of curvature that are held whole, for models of at most some thousands of parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Product

_GROWTH = 10.0
_LEAST = 1e-12
"""First number that is added to a diagonal, as a part of its mean."""


def matrix_of(product: Product, x: Tensor) -> Tensor:
    """Return the matrix of a product, [n, n], exactly symmetric: a column by each of n products.

    Args:
        product: product with a vector like `x`.
        x: vector of n numbers.
    """
    columns = x.new_empty(x.numel(), x.numel())
    unit = torch.zeros_like(x)
    for index in range(x.numel()):
        unit[index] = 1.0
        columns[index] = product(unit)
        unit[index] = 0.0
    return (columns + columns.T) / 2


def solved(matrix: Tensor, right: Tensor, damping: float, scale: Tensor) -> tuple[Tensor, float]:
    """Solve (matrix + damping diag(scale)) x = right, with more damping if that matrix is not positive definite.

    Args:
        matrix: symmetric matrix, [n, n].
        right: right side, [n].
        damping: damping, at least 0.
        scale: what it multiplies, above 0, [n].

    Returns:
        The solution, and the damping that was used; a solution of zeros if the matrix is not finite.
    """
    if not torch.isfinite(matrix).all():
        return torch.zeros_like(right), damping
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(damping * scale))
        if not failed and torch.isfinite(factor.diagonal()).all():
            return torch.cholesky_solve(right[:, None], factor)[:, 0], damping
        least = _LEAST * float(matrix.diagonal().abs().mean() / scale.mean()) or _LEAST
        damping = max(_GROWTH * damping, least)

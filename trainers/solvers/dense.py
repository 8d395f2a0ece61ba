"""Matrices of curvature that are held whole, for models of at most some thousands of parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Product

_GROWTH = 10.0
_LEAST = 1e-12
"""First number that is added to a diagonal, as a part of its mean."""
_ROUNDINGS = 16.0
"""Roundings, times the number of rows, below which an eigenvalue or pivot is none, as a part of the largest."""


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
    """Solve (matrix + damping diag(scale)) x = right, with more damping if that matrix has negative eigenvalues.

    A matrix that is singular, up to rounding, has the shortest solution. Along directions without curvature there is
    only noise to go by, which differs with the replicas. The sum of the classes' weights of a softmax is one.

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
        damped = matrix + torch.diag(damping * scale)
        factor, failed = torch.linalg.cholesky_ex(damped)
        pivots = factor.diagonal().square()
        rounding = _ROUNDINGS * len(right) * torch.finfo(damped.dtype).eps
        if not failed and torch.isfinite(pivots).all() and pivots.min() > rounding * pivots.max():
            return torch.cholesky_solve(right[:, None], factor)[:, 0], damping
        values, vectors = torch.linalg.eigh(damped)
        least_value = rounding * float(values.abs().max())
        if float(values.min()) >= -least_value:
            kept = vectors[:, values > least_value]
            return kept @ ((kept.T @ right) / values[values > least_value]), damping
        least = _LEAST * float(matrix.diagonal().abs().mean() / scale.mean()) or _LEAST
        damping = max(_GROWTH * damping, least)

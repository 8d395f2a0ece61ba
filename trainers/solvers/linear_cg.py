"""Linear conjugate gradients, for systems of equations that are known by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Product

_LEAST_WINDOW = 10


def conjugate_gradients(
    product: Product, right: Tensor, start: Tensor, *, most: int, tolerance: float
) -> tuple[Tensor, int]:
    """Minimise x A x / 2 - b x by conjugate gradients, and stop early.

    They stop where the last tenth of the iterations, at least 10, has lowered the quadratic by less than `tolerance` of
    it an iteration (J. Martens, "Deep learning via Hessian-free optimization", 2010, section 4.4), or where the
    curvature along a direction is not positive.

    Args:
        product: product with the matrix A.
        right: right side b, [n].
        start: start of the iterations, [n].
        most: largest number of iterations.
        tolerance: least relative progress of an iteration.

    Returns:
        The solution, and the number of iterations.
    """
    x = start.clone()
    rest = right - product(x) if x.any() else right.clone()
    direction, square = rest.clone(), float(rest @ rest)
    values: list[float] = []
    for count in range(most):
        if square == 0:
            return x, count
        moved = product(direction)
        bend = float(direction @ moved)
        if not bend > 0:
            return (right if count == 0 and not x.any() else x), count
        length = square / bend
        x += length * direction
        rest -= length * moved
        values.append(-float(x @ (rest + right)) / 2)
        window = max(_LEAST_WINDOW, len(values) // 10)
        if len(values) > window and values[-1] < 0:
            progress = (values[-1] - values[-1 - window]) / values[-1]
            if progress < window * tolerance:
                return x, count + 1
        before, square = square, float(rest @ rest)
        direction = rest + square / before * direction
        if not torch.isfinite(direction).all():
            return x, count + 1
    return x, most

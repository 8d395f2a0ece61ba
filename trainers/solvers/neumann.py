"""Steps by a Neumann series of the inverse Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Oracle, Product, Solver, Taken

_MARGIN = 1.1
"""Factor on the largest eigenvalue that was found, which is a lower bound."""


class Neumann(Solver):
    """Steps by a truncated Neumann series of the inverse Hessian.

        x <- x - lr eta sum over k < terms of (I - eta B)^k g

    The series is B^-1 g in the limit, if eta is below 2 over the largest eigenvalue of B. Each term costs a product
    with B; no system is solved. It is the idealised method of S. Krishnan, Y. Xiao and R. Saurous, "Neumann Optimizer:
    A Practical Optimization Algorithm for Large Neural Networks" (ICLR 2018), with a damping instead of their
    regularisers. `eta` is 1 over the largest eigenvalue, which a few power iterations from the gradient find.
    """

    def __init__(
        self, curvature: str = "gauss_newton", terms: int = 10, damping: float = 1e-2, power_iterations: int = 5
    ) -> None:
        """
        Args:
            curvature: the matrix, `gauss_newton` or `hessian`, to which the damping is added.
            terms: number of terms of the series.
            damping: damping, at least 0.
            power_iterations: products by which the largest eigenvalue is found.
        """
        super().__init__()
        self._curvature, self._terms, self._damping, self._power = curvature, terms, damping, power_iterations

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        value, gradient = oracle.gradient(x)
        metrics = {"grad_norm": float(gradient.norm())}
        if not torch.isfinite(gradient).all() or not gradient.any():
            return Taken(x, value, [], metrics)
        bare = oracle.gauss_newton(x) if self._curvature == "gauss_newton" else oracle.hessian(x)

        def bend(vector: Tensor) -> Tensor:
            return bare(vector) + self._damping * vector

        metrics["curvature"] = largest = largest_eigenvalue(bend, gradient, self._power)
        eta = 1.0 / (_MARGIN * largest) if largest > 0 else 1.0
        step = inverse_times(bend, gradient, eta, self._terms)
        return Taken(x - lr * step, value, [], metrics)


def inverse_times(product: Product, vector: Tensor, eta: float, terms: int) -> Tensor:
    """Return eta times the sum of (I - eta B)^k v for k < `terms`, which tends to B^-1 v.

    Args:
        product: product with the symmetric matrix B.
        vector: the vector v, [n].
        eta: step of the series, below 2 over the largest eigenvalue.
        terms: number of terms, at least 1.
    """
    term, total = vector, vector.clone()
    for _ in range(terms - 1):
        term = term - eta * product(term)
        total += term
    return eta * total


def largest_eigenvalue(product: Product, start: Tensor, iterations: int) -> float:
    """Return the length to which a product stretches a unit vector, after some power iterations.

    Args:
        product: product with a symmetric matrix.
        start: vector to begin with, not 0.
        iterations: number of products, at least 1.
    """
    vector, largest = start, 0.0
    for _ in range(iterations):
        vector = product(vector / vector.norm())
        largest = float(vector.norm())
        if not largest:
            break
    return largest

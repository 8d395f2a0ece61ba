"""A function with an L2 penalty of its parameters."""

from __future__ import annotations

from torch import Tensor

from orchestray.trainers.solvers.base import Oracle, Product


class Penalised:
    """An `Oracle` whose function is that of another one plus `weight_decay` / 2 times the squares of the parameters."""

    def __init__(self, oracle: Oracle, weight_decay: float) -> None:
        self._oracle, self._decay = oracle, weight_decay
        self.resolution, self.num_batches = oracle.resolution, oracle.num_batches

    def penalty(self, x: Tensor) -> float:
        """Return the penalty at `x`."""
        return self._decay / 2 * float(x @ x)

    def value(self, x: Tensor) -> float:
        return self._oracle.value(x) + self.penalty(x)

    def gradient(self, x: Tensor) -> tuple[float, Tensor]:
        value, gradient = self._oracle.gradient(x)
        return value + self.penalty(x), gradient + self._decay * x

    def hessian(self, x: Tensor) -> Product:
        return self._with_penalty(self._oracle.hessian(x))

    def gauss_newton(self, x: Tensor) -> Product:
        return self._with_penalty(self._oracle.gauss_newton(x))

    def whole_gradient(self, x: Tensor) -> Tensor:
        return self._oracle.whole_gradient(x) + self._decay * x

    def _with_penalty(self, product: Product) -> Product:
        return lambda vector: product(vector) + self._decay * vector

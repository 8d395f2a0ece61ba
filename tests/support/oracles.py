"""Functions for solvers to minimise, whose minima and derivatives are known otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Oracle, Product, Solver, Taken

Formula = Callable[[Tensor], Tensor]


class FormulaOracle:
    """An `Oracle` of a formula, or of the mean of several: `see` chooses one, and the whole data are all of them."""

    resolution = 1e-14

    def __init__(self, *formulas: Formula, residuals: Formula | None = None) -> None:
        """
        Args:
            formulas: functions of the parameters.
            residuals: residuals of which the only formula is the mean of the squares.
        """
        self._formulas, self._residuals = formulas, residuals
        self.num_batches = len(formulas)
        self.num_calls = 0
        """Number of evaluations of any kind, without those of the whole data."""
        self.see(0)

    def see(self, batch: int) -> None:
        self._formula = self._formulas[batch % self.num_batches]

    def value(self, x: Tensor) -> float:
        self.num_calls += 1
        return float(self._formula(x))

    def gradient(self, x: Tensor) -> tuple[float, Tensor]:
        self.num_calls += 1
        return float(self._formula(x)), self._gradient(self._formula, x)

    def hessian(self, x: Tensor) -> Product:
        self.num_calls += 1
        matrix = torch.autograd.functional.hessian(self._formula, x)
        return lambda vector: matrix @ vector

    def gauss_newton(self, x: Tensor) -> Product:
        if self._residuals is None:
            return self.hessian(x)
        self.num_calls += 1
        jacobian = torch.autograd.functional.jacobian(self._residuals, x)
        return lambda vector: 2.0 / len(jacobian) * (jacobian.T @ (jacobian @ vector))

    def whole_gradient(self, x: Tensor) -> Tensor:
        return torch.stack([self._gradient(formula, x) for formula in self._formulas]).mean(0)

    def whole_value(self, x: Tensor) -> float:
        return float(sum(float(formula(x)) for formula in self._formulas)) / self.num_batches

    @staticmethod
    def _gradient(formula: Formula, x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(formula(leaf), leaf)
        return gradient


def least_squares(residuals: Formula) -> FormulaOracle:
    """Return the oracle of the mean of squared residuals."""
    return FormulaOracle(lambda x: residuals(x).square().mean(), residuals=residuals)


def steps_of(
    solver: Solver, oracle: Oracle, x: Tensor, steps: int, *, lr: float = 1.0, order: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Taken]]:
    """Return the parameters before the first step and after each, and the steps.

    Args:
        solver: solver, without a memory.
        oracle: function to minimise.
        x: parameters to begin with.
        steps: number of steps.
        lr: learning rate.
        order: batch of each step; None: one after the other.
    """
    solver.begin(x)
    path, made = [x], list[Taken]()
    for step in range(steps):
        if isinstance(oracle, FormulaOracle):
            oracle.see(step if order is None else order[step])
        taken = solver.find(path[-1], oracle, lr)
        solver.make(taken)
        path.append(taken.x.clone())
        made.append(taken)
    return path, made


def rosenbrock(x: Tensor) -> Tensor:
    """Return Rosenbrock's function of any number of parameters, whose minimum is 0 where all are 1."""
    return (100.0 * (x[1:] - x[:-1].square()).square() + (1.0 - x[:-1]).square()).sum()


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_matrix(size: int, condition: float, seed: int = 0) -> Tensor:
    """Return a symmetric positive definite matrix with eigenvalues spread evenly by their logarithm, up to 1."""
    generator = torch.Generator().manual_seed(seed)
    axes, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix: Tensor = axes @ torch.diag(torch.logspace(-math.log10(condition), 0.0, size).double()) @ axes.T
    return (matrix + matrix.T) / 2


def quadratic(matrix: Tensor, linear: Tensor) -> Formula:
    """Return x A x / 2 - b x."""
    return lambda x: x @ (matrix @ x) / 2 - linear @ x


def random_vector(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logistic(num_batches: int, size: int, *, decay: float, spread: float = 1.0, seed: int = 2) -> FormulaOracle:
    """Return logistic regression on random samples, 20 a batch, with an L2 penalty that makes it strongly convex.

    Args:
        num_batches: number of batches.
        size: number of parameters.
        decay: factor of the penalty.
        spread: ratio of the scales of the first and the last feature.
        seed: seed of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0.0, -math.log10(spread), size).double()
    inputs = torch.randn(num_batches, 20, size, generator=generator, dtype=torch.float64) * scales
    true = torch.randn(size, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_batches, 20, generator=generator, dtype=torch.float64)
    signs = torch.sign(inputs @ true + noise)

    def batch(index: int) -> Formula:
        rows, sides = inputs[index], signs[index]
        return lambda x: torch.nn.functional.softplus(-sides * (rows @ x)).mean() + decay / 2 * (x @ x)

    return FormulaOracle(*(batch(index) for index in range(num_batches)))

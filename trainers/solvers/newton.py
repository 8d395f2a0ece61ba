"""Newton's method."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Oracle, Solver, Taken
from orchestray.trainers.solvers.dense import matrix_of, solved
from orchestray.trainers.solvers.line_search import Line


class Newton(Solver):
    """Newton's method with the whole Hessian, which is factorised.

        x <- x - a (H + damping I)^-1 g

    Without damping, and near a minimum with a positive definite Hessian, each step squares the error. Elsewhere the
    damping is raised until the matrix is positive definite, and the step is halved until the function falls enough.
    Nocedal and Wright, "Numerical Optimization" (2006), theorem 3.5, algorithms 3.1 and 3.3.
    """

    def __init__(self, damping: float = 0.0) -> None:
        super().__init__()
        self._damping = damping

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        value, gradient = oracle.gradient(x)
        metrics = {"grad_norm": float(gradient.norm()), "step_length": 0.0, "evaluations": 0.0}
        if not torch.isfinite(gradient).all():
            return Taken(x, value, [], metrics)
        matrix = matrix_of(oracle.hessian(x), x)
        direction, metrics["damping"] = solved(matrix, -gradient, self._damping, torch.ones_like(x))
        line = Line(oracle, x, value, gradient, direction)
        found = line.backtrack(lr)
        metrics["evaluations"] = float(line.num_points)
        if found is None:
            return Taken(x, value, [], metrics)
        metrics["step_length"], x, _ = found
        return Taken(x, value, [], metrics)

"""The Levenberg-Marquardt method."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Changes, Oracle, Solver, Taken, number
from orchestray.trainers.solvers.dense import matrix_of, solved

_MOST_TRIES = 20
_MOST_DAMPING = 1e20
_LEAST_SCALE = 1e-10
"""Least entry of the diagonal that the damping multiplies, as a part of the largest."""


class LevenbergMarquardt(Solver):
    """Damped Gauss-Newton steps (Levenberg 1944; Marquardt 1963).

        x <- x - (G + damping diag(G))^-1 g

    G is the Gauss-Newton matrix: J^T J of the residuals, up to a factor, if the loss is the mean of squared errors. A
    step by which the function does not fall is tried again with more damping; the damping follows the ratio of the
    actual decrease to that of the quadratic model (H. Nielsen, "Damping parameter in Marquardt's method", 1999).
    """

    def __init__(self, damping: float = 1e-3) -> None:
        super().__init__()
        self._damping = damping

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {"damping": number(x) + self._damping, "growth": number(x) + 2.0}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        value, gradient = oracle.gradient(x)
        damping, growth = float(self.state["damping"]), float(self.state["growth"])
        metrics = {"grad_norm": float(gradient.norm()), "damping": damping, "evaluations": 0.0, "step_length": 0.0}
        if not torch.isfinite(gradient).all() or not gradient.any():
            return Taken(x, value, [], metrics)
        matrix = matrix_of(oracle.gauss_newton(x), x)
        diagonal = matrix.diagonal()
        scale = diagonal.clamp_min(max(_LEAST_SCALE * float(diagonal.max()), torch.finfo(x.dtype).tiny))
        end = x
        for _ in range(_MOST_TRIES):
            step, damping = solved(matrix, -gradient, damping, scale)
            step *= lr
            metrics["evaluations"] += 1.0
            promised = -float(gradient @ step + step @ (matrix @ step) / 2)
            decrease, rounding = value - oracle.value(x + step), oracle.resolution * abs(value)
            hides = promised <= rounding and decrease >= -rounding  # at the minimum there is nothing to judge by
            if hides or decrease > 0:  # neither for a value that is not a number
                if not hides:
                    damping *= max(1 / 3, 1 - (2 * decrease / promised - 1) ** 3)
                growth, end, metrics["step_length"] = 2.0, x + step, float(step.norm())
                break
            damping, growth = min(damping * growth, _MOST_DAMPING), growth * 2
        changes: Changes = [(self.state["damping"], damping), (self.state["growth"], growth)]
        return Taken(end, value, changes, metrics)

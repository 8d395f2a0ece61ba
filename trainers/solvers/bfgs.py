"""BFGS: an approximation of the inverse Hessian from the changes of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Changes
from orchestray.trainers.solvers.line_search import LineSearchSolver, Searched

LEAST_CURVATURE = 1e-10
"""Least curvature along a step, relative to the lengths of step and change, from which a solver learns."""


class Bfgs(LineSearchSolver):
    """BFGS (Broyden, Fletcher, Goldfarb and Shanno, 1970).

        H <- (I - s y' / y's) H (I - y s' / y's) + s s' / y's

    Nocedal and Wright, "Numerical Optimization" (2006), algorithm 6.1, with equation 6.20 for the first matrix. It
    keeps n x n numbers.
    """

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().fresh(x), "inverse": x.new_zeros(x.numel(), x.numel())}

    def direction(self, gradient: Tensor) -> Tensor:
        return -(self.state["inverse"] @ gradient)

    def learn(self, made: Searched, *, is_first: bool) -> Changes:
        inverse, step, change = self.state["inverse"], made.step, made.change
        curvature = float(step @ change)
        if curvature <= LEAST_CURVATURE * float(step.norm() * change.norm()):
            return [(self.state["learned"], 0.0)] if is_first else []
        if is_first:
            scale = curvature / float(change @ change)
            inverse = scale * torch.eye(len(step), dtype=step.dtype, device=step.device)
        moved = inverse @ change
        outer = torch.outer(step, moved) / curvature
        grown = (1.0 + float(change @ moved) / curvature) / curvature * torch.outer(step, step)
        return [(self.state["inverse"], inverse - outer - outer.T + grown)]

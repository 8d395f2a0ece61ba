"""Nonlinear conjugate gradients."""

from __future__ import annotations

from torch import Tensor

from orchestray.trainers.solvers.base import Changes, Oracle
from orchestray.trainers.solvers.line_search import LineSearchSolver, Searched

_MOST_ALIKE = 0.1
"""Product of two gradients in a row, relative to the square of the later one, from which the directions begin again."""


class ConjugateGradient(LineSearchSolver):
    """Nonlinear conjugate gradients with the rule of Polak and Ribiere, never negative (PR+).

        d <- -g' + max(0, g'(g' - g) / gg) d

    Nocedal and Wright, "Numerical Optimization" (2006), section 5.2, with Powell's restart (equation 5.52) where two
    gradients in a row are far from orthogonal. The line search begins at the minimum of the quadratic along the
    direction, by one product with the Hessian. On a quadratic function that is the minimum itself, and so the steps are
    those of linear conjugate gradients: n are enough.
    """

    curvature = 0.1

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().fresh(x), "direction": x.new_zeros(x.numel())}

    def direction(self, gradient: Tensor) -> Tensor:
        return self.state["direction"].clone()

    def first_length(self, x: Tensor, gradient: Tensor, direction: Tensor, oracle: Oracle) -> float:
        bend = float(direction @ oracle.hessian(x)(direction))
        if bend > 0:
            return -float(gradient @ direction) / bend
        return 1.0 / float(direction.norm())

    def learn(self, made: Searched, *, is_first: bool) -> Changes:
        after, before = made.end.gradient, made.gradient
        kept = max(0.0, float(after @ made.change) / float(before @ before))
        if abs(float(after @ before)) >= _MOST_ALIKE * float(after @ after):
            kept = 0.0
        return [(self.state["direction"], kept * made.direction - after)]

"""Hessian-free optimisation: Newton steps by conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.solvers.base import Changes, Oracle, Solver, Taken, number
from orchestray.trainers.solvers.line_search import Line
from orchestray.trainers.solvers.linear_cg import conjugate_gradients

_KEPT = 0.95
"""Part of the last solution from which conjugate gradients begin."""


class HessianFree(Solver):
    """Hessian-free optimisation (J. Martens, "Deep learning via Hessian-free optimization", ICML 2010).

    Conjugate gradients solve (B + damping I) d = -g for the Gauss-Newton matrix B or the Hessian, by products alone.
    They begin at a part of the last solution and stop early (sections 4.4 and 4.5). The damping follows the ratio of
    the actual decrease to that of the quadratic model (section 4.1). The step is halved until the function falls.
    """

    def __init__(
        self,
        curvature: str = "gauss_newton",
        damping: float = 1.0,
        iterations: int = 50,
        tolerance: float = 5e-4,
    ) -> None:
        """
        Args:
            curvature: matrix of the quadratic model, `gauss_newton` or `hessian`.
            damping: damping of the first step.
            iterations: largest number of iterations of conjugate gradients.
            tolerance: least relative progress of an iteration.
        """
        super().__init__()
        self._curvature, self._damping = curvature, damping
        self._iterations, self._tolerance = iterations, tolerance

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {"damping": number(x) + self._damping, "solution": x.new_zeros(x.numel())}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        value, gradient = oracle.gradient(x)
        damping, state = float(self.state["damping"]), self.state
        metrics = {"grad_norm": float(gradient.norm()), "damping": damping, "step_length": 0.0, "evaluations": 0.0}
        if not torch.isfinite(gradient).all() or not gradient.any():
            return Taken(x, value, [], metrics)
        bend = oracle.gauss_newton(x) if self._curvature == "gauss_newton" else oracle.hessian(x)
        start = _KEPT * state["solution"]
        solution, count = conjugate_gradients(
            lambda vector: bend(vector) + damping * vector,
            -gradient,
            start,
            most=self._iterations,
            tolerance=self._tolerance,
        )
        metrics["cg_iterations"] = float(count)
        # Without the damping: the model that the next damping is judged by (section 4.1).
        promised = -float(gradient @ solution + solution @ bend(solution) / 2)
        line = Line(oracle, x, value, gradient, solution)
        found = line.backtrack(lr) if line.start.slope < 0 else None
        metrics["evaluations"] = float(line.num_points)
        if found is None:
            return Taken(x, value, [(state["damping"], 1.5 * damping), (state["solution"], 0.0)], metrics)
        length, end, after = found
        metrics["step_length"] = length
        ratio = (value - after) / promised if promised > 0 and length == lr else 0.0
        if ratio < 1 / 4:
            damping *= 3 / 2
        elif ratio > 3 / 4:
            damping *= 2 / 3
        changes: Changes = [(state["damping"], damping), (state["solution"], solution)]
        return Taken(end, value, changes, metrics)

"""YellowFin: momentum SGD that tunes its momentum and its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.optim.curvature import NUM_AVERAGES, Measured
from orchestray.trainers.optim.optimizers import Optimizer


class YellowFin(Optimizer):
    """YellowFin (Zhang and Mitliagkas 2019, "YellowFin and the Art of Momentum Tuning", algorithm 1).

        v <- mu v - lr alpha g
        w <- w + v

    `Measured.tune` finds the momentum mu and the rate alpha from three measurements. These are the range of the
    curvature (squared norms of the last `window` gradients), the variance of the gradient and the distance to the
    optimum. `lr` is a factor on the tuned rate. Averages are corrected for their initial bias. The curvature is
    averaged by its logarithm, as in section 4 of the paper and its authors' code. A gradient of zeros is not measured.

    All replicas of a synchronous scheme measure the same gradient, so they tune alike. If workers hold parts of the
    model, `total_reducer` must be set.
    """

    slots = ("tuner", "momentum_buffer", "grad_avg", "grad_sq_avg")
    takes_complex = False

    def __init__(
        self, beta: float = 0.999, window: int = 20, slow_start: bool = True, weight_decay: float = 0.0
    ) -> None:
        """Initialise without state.

        Args:
            beta: decay of the averages.
            window: number of gradients from which the range of the curvature is estimated.
            slow_start: reduce the rate in the first 10 windows.
            weight_decay: factor of the weights that are added to the gradient.
        """
        super().__init__()
        self._beta, self._window, self._slow_start, self._weight_decay = beta, window, slow_start, weight_decay
        self.whole_slots = {**self.whole_slots, "tuner": (NUM_AVERAGES + window,)}

    def _fresh(self, slot: str, parameter: Tensor) -> Tensor | None:
        if slot == "tuner":
            return torch.zeros(self.whole_slots[slot], dtype=torch.float64)
        return super()._fresh(slot, parameter)

    @property
    def measured(self) -> Measured:
        """Measured properties of the objective, and momentum and rate of the last step."""
        # Every parameter has a copy, which moves with it. The copy of a parameter not used lately is out of date.
        known = [tuner for tuner in self._state["tuner"] if tuner is not None]
        return Measured.of(max(known, key=lambda tuner: float(tuner[0])).tolist())

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        if self.total_reducer is not None and all(grad is None for grad in grads):
            self.total_reducer([], torch.zeros(3, 0, dtype=torch.float64))  # others wait for this worker's sums
        else:
            super().step(params, grads, lr)

    def step_metrics(self) -> dict[str, float]:
        if all(tuner is None for tuner in self._state["tuner"]):  # a stage that trains nothing
            return {}
        measured = self.measured
        return {"tuned_lr": measured.lr, "tuned_momentum": measured.momentum}

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        beta, measured = self._beta, self.measured
        pulls = torch._foreach_add(grads, params, alpha=self._weight_decay) if self._weight_decay else grads
        averages, squares = state["grad_avg"], state["grad_sq_avg"]
        torch._foreach_lerp_(averages, pulls, 1.0 - beta)
        torch._foreach_mul_(squares, beta)
        torch._foreach_addcmul_(squares, pulls, pulls, 1.0 - beta)
        squared_norm, second, first = self._totals(pulls, squares, averages)
        if squared_norm:
            measured.measure(squared_norm, beta)
            whole = 1.0 - beta**measured.step
            measured.tune(max(second / whole - first / whole**2, 0.0), beta, slow_start=self._slow_start)
        elif beta:  # a gradient of zeros would be a curvature of zero, and the next rate next to infinite
            torch._foreach_div_([*averages, *squares], beta)
        torch._foreach_mul_(state["momentum_buffer"], measured.momentum)
        torch._foreach_add_(state["momentum_buffer"], pulls, alpha=-lr * measured.lr)
        torch._foreach_add_(params, state["momentum_buffer"])
        values = torch.tensor(measured.values(), dtype=torch.float64)
        for tuner in state["tuner"]:
            tuner.copy_(values)

    def _totals(self, pulls: Sequence[Tensor], squares: Sequence[Tensor], averages: Sequence[Tensor]) -> list[float]:
        """Return sums over all parameters: of the squared gradient, its averaged square and its squared average."""
        each = torch.stack(
            [
                torch.stack([norm.double().square() for norm in torch._foreach_norm(list(pulls))]),
                torch.stack([square.sum(dtype=torch.float64) for square in squares]),
                torch.stack([norm.double().square() for norm in torch._foreach_norm(list(averages))]),
            ]
        )
        if self.total_reducer is not None:
            totals: list[float] = self.total_reducer(self._updated_names, each).tolist()
            return totals
        return [float(total) for total in each.sum(dim=1).tolist()]

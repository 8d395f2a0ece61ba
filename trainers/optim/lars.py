"""LARS and LAMB: a learning rate per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.optim.adaptive import Adam
from orchestray.trainers.optim.optimizers import Optimizer


class LayerWise(Optimizer):
    """An optimizer with a rate per parameter, from norms of whole parameters.

    If workers hold parts of them, `norm_reducer` must be set.
    """

    uses_norms = True

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        if self.norm_reducer is not None and all(grad is None for grad in grads):
            self.norm_reducer([], torch.zeros(2, 0, dtype=torch.float64))  # others wait for this worker's norms
        else:
            super().step(params, grads, lr)

    def _norms(self, params: list[Tensor], others: list[Tensor]) -> tuple[list[float], list[float]]:
        """Return the norms of the whole parameters, and of the others, which have the same shapes."""
        norms = [torch.stack([norm.double() for norm in torch._foreach_norm(tensors)]) for tensors in (params, others)]
        if self.norm_reducer is not None:
            norms = list(self.norm_reducer(self._updated_names, torch.stack(norms).square_()).sqrt_())
        return norms[0].tolist(), norms[1].tolist()


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017).

    "Large Batch Training of Convolutional Networks", algorithm 1. For each parameter w with gradient g, rate lr,
    momentum m, weight decay b and trust coefficient e:

        local = e ||w|| / (||g|| + b ||w|| + eps)
        v <- m v + lr local (g + b w)
        w <- w - v

    `local` is 1 where ||w|| or ||g|| is 0, so that a bias that starts at zero can move. The norms are those of whole
    parameters: if workers hold parts of them, `norm_reducer` must be set.
    """

    slots = ("momentum_buffer",)

    def __init__(
        self,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self._momentum, self._weight_decay = momentum, weight_decay
        self._trust_coefficient, self._eps = trust_coefficient, eps
        self._num_rates = 0
        """Number of different rates that the parameters had in the last step."""

    def run_report(self) -> dict[str, Any]:
        """Return the number of different `rates` that the parameters had in the last step; empty before the first."""
        return {"rates": self._num_rates} if self._num_rates else {}

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        buffers = state["momentum_buffer"]
        weight_norms, grad_norms = self._norms(params, grads)
        rates = [lr * self._local(w, g) for w, g in zip(weight_norms, grad_norms, strict=True)]
        self._num_rates = len(set(rates))
        pulls = torch._foreach_add(grads, params, alpha=self._weight_decay)
        torch._foreach_mul_(pulls, rates)
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, pulls)
        torch._foreach_sub_(params, buffers)

    def _local(self, weight_norm: float, grad_norm: float) -> float:
        if weight_norm == 0.0 or grad_norm == 0.0:
            return 1.0
        return self._trust_coefficient * weight_norm / (grad_norm + self._weight_decay * weight_norm + self._eps)


class LAMB(LayerWise, Adam):
    """Layer-wise adaptive moments (You et al., ICLR 2020, "Large Batch Optimization for Deep Learning", algorithm 2).

    For each parameter w with Adam's moments m and v, corrected for their initial bias, and weight decay b:

        u = m / (sqrt(v) + eps) + b w
        w <- w - lr ||w|| / ||u|| u

    The ratio of the norms is 1 where one of them is 0.
    """

    has_fused_kernel = False
    takes_complex = False

    def __init__(self, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01) -> None:
        super().__init__(betas, eps)
        self._penalty = weight_decay

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        moves = [torch.zeros_like(parameter, memory_format=torch.preserve_format) for parameter in params]
        super()._update(moves, grads, state, -1.0, fused=False)  # Adam's step from 0, at a rate of 1
        torch._foreach_add_(moves, params, alpha=self._penalty)
        norms = zip(*self._norms(params, moves), strict=True)
        rates = [lr * (of_w / of_u if of_w > 0.0 and of_u > 0.0 else 1.0) for of_w, of_u in norms]
        torch._foreach_sub_(params, torch._foreach_mul(moves, rates))

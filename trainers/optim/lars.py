"""LARS: a learning rate per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.optim.optimizers import Optimizer


class LARS(Optimizer):
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
    uses_norms = True

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

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        if self.norm_reducer is not None and all(grad is None for grad in grads):
            self.norm_reducer([], torch.zeros(2, 0, dtype=torch.float64))  # others wait for this worker's norms
        else:
            super().step(params, grads, lr)

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        buffers = state["momentum_buffer"]
        weight_norms, grad_norms = self._norms(params, grads)
        rates = [lr * self._local(w, g) for w, g in zip(weight_norms, grad_norms, strict=True)]
        pulls = torch._foreach_add(grads, params, alpha=self._weight_decay)
        torch._foreach_mul_(pulls, rates)
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, pulls)
        torch._foreach_sub_(params, buffers)

    def _norms(self, params: list[Tensor], grads: list[Tensor]) -> tuple[list[float], list[float]]:
        """Return the norms of the whole parameters and of their gradients."""
        norms = [torch.stack([norm.double() for norm in torch._foreach_norm(tensors)]) for tensors in (params, grads)]
        if self.norm_reducer is not None:
            norms = list(self.norm_reducer(self._updated_names, torch.stack(norms).square_()).sqrt_())
        return norms[0].tolist(), norms[1].tolist()

    def _local(self, weight_norm: float, grad_norm: float) -> float:
        if weight_norm == 0.0 or grad_norm == 0.0:
            return 1.0
        return self._trust_coefficient * weight_norm / (grad_norm + self._weight_decay * weight_norm + self._eps)

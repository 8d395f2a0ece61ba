"""Optimizers that scale the step of each element by its past gradients, over torch's functional kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.sparse import is_sparse


class Adagrad(Optimizer):
    """Adagrad of Duchi et al. 2011, diagonal form, equal to `torch.optim.Adagrad`."""

    has_fused_kernel = True

    slots = ("step", "sum")

    def __init__(self, eps: float = 1e-10, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.takes_sparse = not weight_decay
        self._eps, self._weight_decay = eps, weight_decay

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        sparse = is_sparse(grads[0])
        adagrad(
            params,
            grads,
            state["sum"],
            state["step"],
            has_sparse_grad=sparse,
            has_complex=self._has_complex and not fused,
            foreach=not (fused or sparse),
            fused=fused,
            lr=lr,
            weight_decay=self._weight_decay,
            lr_decay=0.0,
            eps=self._eps,
            maximize=False,
        )


class RMSprop(Optimizer):
    """RMSprop of Hinton's lecture 6 (2012), equal to `torch.optim.RMSprop`, not centred."""

    def __init__(
        self, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.slots = ("step", "square_avg", "momentum_buffer") if momentum else ("step", "square_avg")
        self._alpha, self._eps, self._momentum, self._weight_decay = alpha, eps, momentum, weight_decay

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        rmsprop(
            params,
            grads,
            state["square_avg"],
            [],
            state.get("momentum_buffer", []),
            state["step"],
            foreach=True,
            has_complex=self._has_complex,
            lr=lr,
            alpha=self._alpha,
            eps=self._eps,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            centered=False,
        )


class Adam(Optimizer):
    """Adam of Kingma and Ba 2015, equal to `torch.optim.Adam`: weight decay is added to the gradient."""

    has_fused_kernel = True

    slots: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(self, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        super().__init__()
        self._beta1, self._beta2 = betas
        self._eps, self._weight_decay = eps, weight_decay

    def run_report(self) -> dict[str, Any]:
        """Return `betas`, and `moments`: the number of the last step of the moments; empty before the first one."""
        steps = [int(tensor) for tensor in self._state.get("step", ()) if tensor is not None]
        return {"betas": [self._beta1, self._beta2], "moments": max(steps)} if any(steps) else {}

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        adam(
            params,
            grads,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            state["step"],
            foreach=not fused,
            fused=fused,
            has_complex=self._has_complex and not fused,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=lr,
            weight_decay=self._weight_decay,
            eps=self._eps,
            maximize=False,
        )


class AdamW(Adam):
    """AdamW of Loshchilov and Hutter 2019, equal to `torch.optim.AdamW`: weight decay shrinks the parameter itself."""

    decoupled = True

    def __init__(self, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2) -> None:
        super().__init__(betas, eps, weight_decay)

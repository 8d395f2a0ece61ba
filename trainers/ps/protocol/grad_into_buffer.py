"""Gradients of linear layers that are made in the memory from which they are sent, which saves a copy.

Autograd makes the gradient of a parameter in memory of its own choice. The gradient of a linear layer is one matrix
product and can be made anywhere (as Megatron-LM adds it to a buffer: Narayanan et al. 2021, "Efficient large-scale
language model training on GPU clusters using Megatron-LM", section 4.2, on fusing memory-bound operations). The
products are those of autograd, and so are their bits, except for gradients of gradients, whose sums are in another
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Home = Callable[[], Tensor | None]
"""Returns memory of the weight's shape in which its gradient may be made; None: it is in use."""
Pair = tuple[Tensor, Tensor]
"""Factors of a gradient `[outputs, inputs]`: `[rows, outputs]` and `[rows, inputs]`."""


@dataclass(frozen=True)
class Factored:
    """A recipient that prefers the factors of a gradient to the gradient."""

    use: Callable[[], None]
    """Called in each forward pass that a gradient will come from."""
    keep: Callable[[Tensor, Tensor], bool]
    """Called with the factors in the backward pass; False: the gradient is made."""


def make_at_home(layer: nn.Linear, home: Home, factored: Factored | None = None) -> Callable[[], None] | None:
    """Have a layer make the gradient of its weight in the given memory.

    Args:
        layer: layer to change.
        home: called for the memory in the backward pass.
        factored: may keep the factors, so that no gradient is made.

    Returns:
        A function that undoes the change; None: the layer computes in its own way, and is not changed.
    """
    if type(layer) is not nn.Linear or "forward" in vars(layer) or not isinstance(layer.weight, nn.Parameter):
        return None
    weight = layer.weight

    def forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, which callers may use
        if layer.weight is not weight or not _is_plain(input, weight):
            return nn.functional.linear(input, layer.weight, layer.bias)
        if factored is not None and weight.requires_grad:
            factored.use()
        return _Linear.apply(input, weight, layer.bias, home, factored)  # type: ignore[no-any-return,no-untyped-call]

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # a copy of the layer gets one of its own
    return partial(vars(layer).pop, "forward", None)


def _is_plain(inputs: Tensor, weight: Tensor) -> bool:
    """Return True if there will be a gradient, of this dtype, made by autograd's rules alone."""
    return (
        torch.is_grad_enabled()
        and inputs.dtype == weight.dtype
        and type(inputs) in (Tensor, nn.Parameter)
        and inputs.dim() >= 2
        and not torch.is_autocast_enabled(inputs.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, home: Home, factored: Factored | None
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.home, ctx.factored = home, factored
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        outer, inner = grad.reshape(-1, weight.shape[0]), inputs.reshape(-1, weight.shape[1])
        of_weight: Tensor | None = None
        is_last = not torch.is_grad_enabled()  # otherwise this backward is differentiated too
        is_kept = wants_weight and is_last and ctx.factored is not None and ctx.factored.keep(outer, inner)
        if wants_weight and not is_kept:
            home = ctx.home() if is_last else None
            of_weight = outer.t().mm(inner) if home is None else torch.mm(outer.t(), inner, out=home)
        of_inputs = outer.mm(weight).view(inputs.shape) if wants_inputs else None
        return of_inputs, of_weight, outer.sum(0) if wants_bias else None, None, None

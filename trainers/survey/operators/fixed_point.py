"""Fully connected layers in fixed point, for CPUs (Vanhoucke et al. 2011)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOST = 127


class FixedPointLinear(nn.Module):
    """A fully connected layer with weights and inputs of 8 bits, products in integers, and biases in full precision.

    A weight is a whole number times the scale of its row, an input one times the scale of its sample.

    Args:
        linear: the layer in full precision.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        own = {name: each.detach().clone() for name, each in linear.named_parameters()}
        weight, scales = to_fixed_point(own["weight"])
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", own.get("bias"))

    def forward(self, x: Tensor) -> Tensor:
        values, scales = to_fixed_point(x)
        # Sums of 2**16 products of 8 bits fit in 32. torch has no public name for such a product.
        sums = torch._int_mm(values.reshape(-1, x.shape[-1]), self.weight.t()).reshape(*x.shape[:-1], len(self.weight))
        out = sums.to(x.dtype) * scales * self.scales.squeeze(1)
        return out if (bias := self.bias) is None else out + bias


def to_fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each row as 8-bit integers, and the scale [rows, 1] by which each is multiplied."""
    scales = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / _MOST
    return (x / scales).round().to(torch.int8), scales


def in_fixed_point(module: nn.Module) -> nn.Module:
    """Return the network with its fully connected layers in fixed point; the network itself is changed."""
    if isinstance(module, nn.Linear):
        return FixedPointLinear(module)
    for name, child in module.named_children():
        setattr(module, name, in_fixed_point(child))
    return module

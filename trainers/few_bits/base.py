"""The interface of a quantization, and the straight-through estimator that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn


class Quantizer(nn.Module):
    """A module of a scheme, which keeps an example of what it has quantized."""

    def __init__(self) -> None:
        super().__init__()
        self._example: Tensor | None = None
        """The first row of the last tensor that it quantized."""

    def keep_example(self, quantized: Tensor) -> Tensor:
        """Keep the first row of a quantized tensor, and return the tensor."""
        if len(quantized):
            self._example = quantized[0].detach().clone()
        return quantized

    def run_report(self) -> dict[str, Any]:
        """Return the number of different `values` in the last row that was looked at; empty before one."""
        if self._example is None:
            return {}
        return {"values": len(self._example.unique())}  # type: ignore[no-untyped-call]


class Scheme(ABC):
    """A quantization of layers, by modules that a layer's tensors pass through.

    A module of `weights` or `inputs` maps a tensor to its quantized values, of the same shape and dtype. One of
    `gradients` returns its tensor as it is and quantizes the gradient that comes back. A module of `weights` may have a
    `bound`: the real weights are then clipped to that magnitude after each update.
    """

    quantizes_data: ClassVar[bool] = False
    """True if the inputs of the model's first layer, which are data, are quantized as well."""

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - most schemes need nothing
        """Change what else in a model does not go with the scheme, in place."""

    @abstractmethod
    def weights(self) -> nn.Module:
        """Return the module for the weights of one layer."""

    def inputs(self) -> nn.Module | None:
        """Return the module for the inputs of one layer; None: they stay."""
        return None

    def gradients(self) -> nn.Module | None:
        """Return the module for the gradients of one layer's outputs; None: they stay."""
        return None


def straight_through(values: Tensor, quantized: Tensor, passes: Tensor | None = None) -> Tensor:
    """Return quantized values through which gradients go as if they were the values.

    Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation" (2013).

    Args:
        values: the values.
        quantized: the same in few bits, of the same shape, without gradients.
        passes: booleans of that shape, True where a gradient goes through; None: everywhere.
    """
    return cast(Tensor, cast(Any, _StraightThrough.apply)(values, quantized, passes))


class _StraightThrough(torch.autograd.Function):
    """The function quantized(values) with the gradient of the identity where `passes`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, quantized: Tensor, passes: Tensor | None) -> Tensor:
        ctx.save_for_backward(passes)
        return quantized.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (passes,) = ctx.saved_tensors
        return gradient if passes is None else gradient * passes, None, None

"""Training that keeps what weights start with: zeros stay zero, and weights that are equal stay equal.

By hooks that change the gradient of a weight before anybody sees it. The gradient of a shared value is the sum of those
of its weights: Han, Mao and Dally, "Deep Compression" (2016), section 3.3, equation 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

Kept: TypeAlias = Literal["zeros", "values"]

_MOST_VALUES = 257
"""Largest number of values, zero included, of a tensor whose values are shared."""


def is_weight(parameter: Tensor) -> bool:
    """Return True for floating-point numbers with two dimensions or more: not for biases and normalisation."""
    return parameter.dim() >= 2 and parameter.is_floating_point()


def keep(model: nn.Module, what: Kept) -> None:
    """Have the gradients of a model's weights keep their zeros, or their equal values, zeros included.

    An optimizer that moves each weight by its own gradients (all but those of matrices as a whole) then keeps them as
    well. Biases and other parameters of one dimension are free.

    Args:
        model: model with the weights that it starts with.
        what: `zeros`, or `values`; a tensor of more than 256 values besides zero keeps its zeros alone.
    """
    for parameter in model.parameters():
        if not is_weight(parameter) or not parameter.requires_grad:
            continue
        values, codes = torch.unique(parameter.detach(), return_inverse=True)
        hook: Any = None
        if what == "values" and len(values) <= _MOST_VALUES:
            hook = _Shared(codes, values != 0)
        elif bool((values == 0).any()):
            hook = _Masked(parameter.detach() == 0)
        if hook is not None:
            cast("Any", parameter).register_hook(hook)


class _Masked:
    """Gradients without those of some places."""

    def __init__(self, is_zero: Tensor) -> None:
        self._is_zero = is_zero

    def __call__(self, gradient: Tensor) -> Tensor:
        self._is_zero = self._is_zero.to(gradient.device)
        return _like(gradient, _dense(gradient).masked_fill(self._is_zero, 0.0))


class _Shared:
    """The sums of the gradients of weights with the same value, none for the value zero."""

    def __init__(self, codes: Tensor, is_free: Tensor) -> None:
        self._codes, self._is_free = codes, is_free

    def __call__(self, gradient: Tensor) -> Tensor:
        self._codes, self._is_free = self._codes.to(gradient.device), self._is_free.to(gradient.device)
        sums = torch.zeros(len(self._is_free), dtype=gradient.dtype, device=gradient.device)
        sums.index_add_(0, self._codes.reshape(-1), _dense(gradient).reshape(-1))
        return _like(gradient, (sums * self._is_free)[self._codes])


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _like(gradient: Tensor, dense: Tensor) -> Tensor:
    """Return a gradient in the layout of the one that it replaces: a hook may not change that."""
    return dense.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else dense

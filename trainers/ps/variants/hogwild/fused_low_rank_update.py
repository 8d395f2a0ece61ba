"""Gradients of large linear layers, kept as the two factors of which they are the product until the update.

The gradient of a weight, `[outputs, inputs]`, is the product of the layer's output gradient, `[rows, outputs]`, and its
input, `[rows, inputs]` (Xie et al. 2015, "Distributed machine learning via sufficient factor broadcasting", where the
factors are what is sent). If there are few rows, most of a step's memory traffic is writing the whole gradient and
reading it again for the update. Here some rows of the gradient are made at a time, which are still in the processor's
cache when they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from orchestray.trainers.ps.protocol.grad_into_buffer import Factored, Pair, make_at_home

_LARGE_BYTES = 1024 * 1024
"""Bytes of a weight from which on this is used: the gradient of a smaller one stays in the cache anyway."""
_LEAST_SAVED = 4
"""Ratio of the weight's size to that of the factors from which on they are kept; otherwise the product is made at once.
"""
_BLOCK_ROWS = 64
"""Rows of a weight that are updated at a time. Any multiple of it fills whole vector registers, so that every element
is rounded the same way as in the whole.
"""


class LowRankUpdate:
    """A store of the factors of gradients, for a model's large linear layers.

    A plain layer that is used once between two calls of `begin` leaves factors here instead of a gradient of its
    weight. Other layers, and weights with gradient hooks, have gradients as usual.
    """

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """
        Args:
            model: model with the layers.
            named: names and trained parameters; places are indices in this list.
        """
        self.is_on = False
        """True if the next backward passes may leave factors."""
        self._num_uses: dict[int, int] = {}
        self._kept: dict[int, Pair] = {}
        places: dict[Tensor, int] = {parameter: index for index, (_, parameter) in enumerate(named)}
        for layer in model.modules():
            if not isinstance(layer, nn.Linear) or layer.weight not in places:
                continue
            if layer.weight.numel() * layer.weight.element_size() >= _LARGE_BYTES and layer.weight.is_contiguous():
                make_at_home(layer, _no_home, Factored(*self._of(places[layer.weight], layer.weight)))

    def begin(self, *, is_on: bool) -> None:
        """Drop the stored factors before the next share.

        Args:
            is_on: True for a single forward and backward pass whose gradients are not read before the update.
        """
        self.is_on = is_on
        self._num_uses.clear()
        self._kept.clear()

    def take(self, gradients: list[Tensor | None]) -> dict[int, Pair]:
        """Remove and return the stored factors, by place.

        A weight that is used twice may have a gradient as well. The product of its factors is then added to the
        gradient, and the factors are left out.

        Args:
            gradients: gradients of the parameters, in which the products are added.
        """
        self.is_on = False
        kept, self._kept = self._kept, {}
        for index in [index for index in kept if gradients[index] is not None]:
            outer, inner = kept.pop(index)
            gradients[index] = gradients[index] + outer.t().mm(inner)  # type: ignore[operator]
        return kept

    def _of(self, index: int, weight: Tensor) -> tuple[Callable[[], None], Callable[[Tensor, Tensor], bool]]:
        return partial(self._use, index), partial(self._keep, index, weight)

    def _use(self, index: int) -> None:
        self._num_uses[index] = self._num_uses.get(index, 0) + 1

    def _keep(self, index: int, weight: Tensor, outer: Tensor, inner: Tensor) -> bool:
        if not self.is_on or self._num_uses.get(index) != 1 or index in self._kept:
            return False
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return False
        if _LEAST_SAVED * (outer.numel() + inner.numel()) > weight.numel():
            return False
        self._kept[index] = (outer, inner)
        return True


def add_product(weight: Tensor, factors: Pair, step: Callable[[Tensor, Tensor], None]) -> None:
    """Update a weight, `[outputs, inputs]`, by the product of two factors, some of its rows at a time.

    Args:
        weight: weight, contiguous.
        factors: `[rows, outputs]` and `[rows, inputs]`.
        step: called with some rows of the weight, and of the gradient.
    """
    outer, inner = factors
    turned, num_rows = outer.t(), weight.shape[0]
    block = torch.empty((min(_BLOCK_ROWS, num_rows), weight.shape[1]), dtype=weight.dtype)
    for start in range(0, num_rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, num_rows)
        step(weight[start:stop], torch.mm(turned[start:stop], inner, out=block[: stop - start]))


def _no_home() -> None:
    return None

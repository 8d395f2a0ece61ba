"""Gradients of large linear layers as the two factors they are the product of, up to the update.

The gradient of a weight, `[outputs, inputs]`, is the product of what came back to the layer, `[rows, outputs]`, and
what went into it, `[rows, inputs]` (Xie et al. 2015, "Distributed machine learning via sufficient factor broadcasting",
where the factors are what is sent). Where rows are few, making the whole of it, and then reading it again for the
update, is most of what a step does with memory. Here some rows of it are made at a time, which are still in the
processor's cache when they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from orchestray.trainers.central.homes import Factored, Pair, make_at_home

_LARGE_BYTES = 1024 * 1024
"""Of a weight: the gradient of a smaller one stays in the cache as it is."""
_LEAST_SAVED = 4
"""The factors are smaller than the weight by this, or the product is made at once."""
_BLOCK_ROWS = 64
"""Of a weight at a time. Any multiple of it fills whole vector registers, so that no element is rounded in another
way than it is in the whole."""


class Factors:
    """Of a model's large linear layers. Plain layers that are used once between two `begin`s leave factors here in
    place of a gradient of their weight; others, and those somebody listens to, have gradients as ever.
    """

    def __init__(self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """
        Args:
            model: whose layers.
            named: the parameters that are trained; places are in this order.
        """
        self.is_on = False
        """Whether the next backward passes may leave factors."""
        self._num_uses: dict[int, int] = {}
        self._kept: dict[int, Pair] = {}
        places: dict[Tensor, int] = {parameter: index for index, (_, parameter) in enumerate(named)}
        for layer in model.modules():
            if not isinstance(layer, nn.Linear) or layer.weight not in places:
                continue
            if layer.weight.numel() * layer.weight.element_size() >= _LARGE_BYTES and layer.weight.is_contiguous():
                make_at_home(layer, _no_home, Factored(*self._of(places[layer.weight], layer.weight)))

    def begin(self, *, is_on: bool) -> None:
        """Forget what is here, for the next share.

        Args:
            is_on: whether it is one forward and one backward pass, whose gradients nobody looks at before the update.
        """
        self.is_on = is_on
        self._num_uses.clear()
        self._kept.clear()

    def take(self, gradients: list[Tensor | None]) -> dict[int, Pair]:
        """The factors that are here, by place. Where there is a gradient as well, of another use of the weight, they
        are added to it, and left out.
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
    """Make an update of a weight, `[outputs, inputs]`, by the product of two factors, some of its rows at a time.

    Args:
        weight: contiguous.
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

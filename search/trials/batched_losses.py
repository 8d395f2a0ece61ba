"""The losses of many members at once.

torch computes a softmax over a short last dimension row by row: of ten classes, thirty times slower than over a
dimension before the last one. A trial alone has few rows. A population has its number of members times as many, and
the loss then takes longer than a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MOST_CLASSES = 32
"""Most classes of which a row is short: beyond, torch's own order is as fast."""


class ShortRows(TorchFunctionMode):
    """While it is on, `cross_entropy` of few classes is computed with the classes before the samples.

    The value is the same up to rounding. Losses of users are reached as well, as long as they call
    `torch.nn.functional.cross_entropy` or `torch.nn.CrossEntropyLoss` on logits [samples, classes].
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **named)
        return func(*args, **named)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **named: Any) -> Tensor:  # noqa: A002 torch's names
    are_rows = input.dim() == 2 and target.dim() == 1 and input.shape[1] <= _MOST_CLASSES
    # A loss a sample would get another shape, and by position or `reduce` it is asked for as well.
    is_reduced = not args and named.get("reduction", "mean") != "none" and named.get("reduce") is None
    if not (are_rows and is_reduced):
        return functional.cross_entropy(input, target, *args, **named)
    return functional.cross_entropy(input.mT[None], target[None], **named)

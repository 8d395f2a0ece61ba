"""Random numbers of split activations that the plan gives no style.

Dropout modules are found when the split model is compared with the plain one: their inputs show which of them get a
part. Dropout that a block draws by itself (in torch's attention, or by a function) is found when it is drawn.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.dropout import FixedWay, SplitDropout, drop_part, drop_split
from orchestray.trainers.parallel.tensor.parts import shown

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

Shapes = dict[str, list[tuple[int, ...]]]
"""Shapes of each dropout's inputs, by its name."""


@contextlib.contextmanager
def watched_dropouts(model: nn.Module) -> Iterator[Shapes]:
    """Record the shapes of the inputs of the model's dropouts inside."""
    shapes: Shapes = {}
    handles = [
        module.register_forward_pre_hook(partial(_note, shapes.setdefault(name, [])))
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd)
    ]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def _note(shapes: list[tuple[int, ...]], _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and isinstance(inputs[0], Tensor):
        shapes.append(tuple(inputs[0].shape))


def draw_for_whole(model: nn.Module, split: Split, plain: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Make each dropout draw for the whole if it gets a part of its input in the plain model.

    Raises:
        ConfigError: one gets parts and wholes that cannot be distinguished.
    """
    for name, wholes in plain.items():
        module = model.get_submodule(name)
        parts = ours.get(name, [])
        if not isinstance(module, _DropoutNd) or isinstance(module, SplitDropout) or len(parts) != len(wholes):
            continue
        cuts = {_cut_between(whole, part, split) for whole, part in zip(wholes, parts, strict=True)} - {None}
        untouched = [whole for whole, part in zip(wholes, parts, strict=True) if whole == part]
        for cut in cuts:
            assert cut is not None
            way = FixedWay(cut)
            if any(way.fits(whole, split.rank) for whole in untouched):
                raise ConfigError(
                    f"{shown(name)} is called with split and with whole activations of the same size, which cannot be "
                    "told apart. Use a dropout for each place, or leave the layers before it whole."
                )
            drop_split(module, name, split, way)


def _cut_between(whole: tuple[int, ...], part: tuple[int, ...], split: Split) -> Cut | None:
    """Return the cut of a tensor of the shape `whole` that gives this worker
    `part`; None if no style made such a cut.
    """
    if len(whole) != len(part):
        return None
    dims = [dim for dim in range(len(whole)) if whole[dim] != part[dim]]
    for cut in split.cuts:
        fits = [cut.dim % len(whole)] == dims
        if fits and (sum(cut.sizes), cut.sizes[split.rank]) == (whole[dims[0]], part[dims[0]]):
            return Cut(dims[0] - len(whole), cut.sizes)
    return None


class WholeDraws(TorchFunctionMode):
    """A mode in which dropout of the attention weights of some heads is drawn for all heads."""

    def __init__(self, cut: Cut, rank: int) -> None:
        super().__init__()
        self._cut = cut
        self._rank = rank
        self.num_draws = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            call = {**named, **options}
            if call.get("dropout_p", 0.0) > 0 and self._is_part(call["query"]):
                return self._attend(**call)
        elif func is functional.dropout:
            call = {"p": 0.5, "training": True, **dict(zip(("input", "p", "training"), args, strict=False)), **options}
            if call["training"] and call["p"] > 0 and self._is_part(call["input"]):
                return self._drop(call["input"], call["p"])
        return func(*args, **options)

    def _is_part(self, x: Tensor) -> bool:
        return x.dim() == 4 and x.shape[1] == self._cut.sizes[self._rank]

    def _drop(self, x: Tensor, p: float) -> Tensor:
        self.num_draws += 1
        return drop_part(x, self._cut, self._rank, lambda ones: functional.dropout(ones, p, training=True))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute torch's attention step by step."""
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None:
            hides = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if hides else scores + attn_mask
        return self._drop(scores.softmax(dim=-1), dropout_p) @ value

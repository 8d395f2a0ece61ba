"""Fully connected layers over a tensor group, and what stands between two of them.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section
3: a layer split by its output features, then one split by its input features, need one all-reduce forward and one
backward. A single layer is split by its output features and gathers them, or by its input features and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.functions import add_up, add_up_parts, enter, gather, gather_terms, scatter
from orchestray.trainers.parallel.tensor.parts import (
    SplitModule,
    become,
    bounds,
    check_plain,
    joined,
    keep,
    kind_of,
    shown,
    sizes_of,
)

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Region, Split
    from orchestray.trainers.parallel.tensor.functions import GroupRef


class Entrance:
    """The entrance of a tensor into split layers: one for all the layers that read the same tensor.

    Query, key and value projections of one input need its gradient summed once, not three times. In a region split
    along the time, its parts are gathered once.
    """

    def __init__(self, group: GroupRef, region: Region | None = None, *, is_shared: bool = False) -> None:
        self._group = group
        self._region = region
        self._is_shared = is_shared
        """True if the last tensor that entered is kept until `forget` is called."""
        self._last: tuple[tuple[int | None, bool], Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not self._is_shared:
            return self._let_in(x)
        key = (None if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._last is None or self._last[0] != key or self._last[1] is not x:
            self._last = (key, x, self._let_in(x))
        return self._last[2]

    def forget(self) -> None:
        self._last = None

    def _let_in(self, x: Tensor) -> Tensor:
        if self._region is not None:
            return gather_terms(x, self._group, self._region.dim, self._region.sizes)
        return enter(x, self._group) if x.requires_grad and torch.is_grad_enabled() else x


class _Output(SplitModule):
    """A layer y_t = x W_t^T + b_t: this worker's features of the output."""

    entrance: Entrance

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(self.entrance(x))
        return y


class _OutputGathered(SplitModule):
    """A layer y = [x W_1^T + b_1, x W_2^T + b_2, ...]: every worker gets all features."""

    entrance: Entrance
    group: GroupRef
    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        return gather(super().forward(self.entrance(x)), self.group, -1, self.sizes)


class _Input(SplitModule):
    """A layer y = sum of x_t W_t^T, + b: the whole output from each worker's features of the input."""

    weight: Tensor
    bias: Tensor | None
    group: GroupRef
    region: Region | None

    def forward(self, x: Tensor) -> Tensor:
        term = functional.linear(x, self.weight)
        if self.region is None:
            y = add_up(term, self.group)
        else:
            y = add_up_parts(term, self.group, self.region.dim, self.region.sizes)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _InputScattered(_Input):
    """An `_Input` that takes a whole input."""

    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scatter(x, self.group, -1, self.sizes))


def split_output(module: nn.Module, name: str, split: Split) -> None:
    """Keep some rows of weight and bias; the output [..., features] stays split.
    Sends an all-reduce of the input's gradient.
    """
    linear = _checked(module, name, "output")
    ranges = bounds(name, "output features", linear.out_features, split)
    cut_output(linear, name, split, [ranges[split.rank]])
    split.cuts.append(Cut(-1, sizes_of(ranges)))
    enter_split(linear, split, name)


def split_output_gathered(module: nn.Module, name: str, split: Split) -> None:
    """Keep some rows of weight and bias; the outputs are gathered: (T-1)/T of the output's bytes forward."""
    linear = _checked(module, name, "output_gathered")
    _outside_regions(name, split, "output_gathered")
    ranges = bounds(name, "output features", linear.out_features, split)
    cut_output(linear, name, split, [ranges[split.rank]])
    gathered = become(linear, _OutputGathered)
    gathered.entrance = Entrance(split.group)
    gathered.group, gathered.sizes = split.group, sizes_of(ranges)


def split_input(module: nn.Module, name: str, split: Split) -> None:
    """Keep some columns of the weight; the input arrives split. Sends an all-reduce of the output, forward."""
    linear = _checked(module, name, "input")
    cut_input(linear, name, split, bounds(name, "input features", linear.in_features, split)[split.rank])


def split_input_scattered(module: nn.Module, name: str, split: Split) -> None:
    """Keep some columns of the weight; each worker slices a whole input. Backward gathers the input's gradient."""
    linear = _checked(module, name, "input_scattered")
    _outside_regions(name, split, "input_scattered")
    ranges = bounds(name, "input features", linear.in_features, split)
    cut_input(linear, name, split, ranges[split.rank], _InputScattered).sizes = sizes_of(ranges)


def split_features(module: nn.Module, name: str, split: Split) -> None:
    """Split a module that treats each feature by itself: batch normalisation [samples, features] or PReLU."""
    cut = split.cuts[-1] if split.cuts else None
    if cut is None or not isinstance(module, _BatchNorm | nn.PReLU):
        raise ConfigError(
            f"The plan splits the module {name!r} ({kind_of(module)}) in the style 'features', which is for "
            "batch normalisation and PReLU after a layer of the style 'output'."
        )
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        split.partial.add(joined(name, "weight"))  # one slope for all features: each worker sees only its own features
        return
    start = sum(cut.sizes[: split.rank])
    count = module.num_parameters if isinstance(module, nn.PReLU) else module.num_features
    if count != sum(cut.sizes):
        raise ConfigError(
            f"The plan splits the module {name!r} as the layer before it, which has {sum(cut.sizes)} features; it has "
            f"{count}. Leave it out of the plan."
        )
    for tensor in ("weight", "bias", "running_mean", "running_var"):
        if getattr(module, tensor, None) is not None:
            keep(module, name, split, tensor, 0, (start, start + cut.sizes[split.rank]))
    if isinstance(module, nn.PReLU):
        module.num_parameters = cut.sizes[split.rank]
    else:
        module.num_features = cut.sizes[split.rank]


def cut_output(linear: nn.Linear, name: str, split: Split, ranges: Sequence[tuple[int, int]]) -> None:
    """Keep the output features at `ranges`."""
    keep(linear, name, split, "weight", 0, *ranges)
    keep(linear, name, split, "bias", 0, *ranges)
    linear.out_features = linear.weight.shape[0]


def cut_input(linear: nn.Linear, name: str, split: Split, own: tuple[int, int], kind: type[_Input] = _Input) -> Any:
    """Keep the input features at `own`, and sum the outputs."""
    keep(linear, name, split, "weight", 1, own)
    linear.in_features = linear.weight.shape[1]
    made = become(linear, kind)
    made.group, made.region = split.group, split.region_of(name)
    return made


def enter_split(linear: nn.Linear, split: Split, name: str, entrance: Entrance | None = None) -> None:
    """Make the layer, whose output features are cut, take its input through an entrance."""
    become(linear, _Output).entrance = entrance or Entrance(split.group, split.region_of(name))


def _checked(module: nn.Module, name: str, style: str) -> nn.Linear:
    check_plain(module, name, style, nn.Linear)
    assert isinstance(module, nn.Linear)
    return module


def _outside_regions(name: str, split: Split, style: str) -> None:
    if split.region_of(name) is not None:
        raise ConfigError(
            f"{shown(name)} has the style {style!r} within a part split along the time (style 'sequence'); there, use "
            "'output' and 'input', or leave it whole."
        )

"""Convolutions over a tensor group, split by their channels.

Split by its output channels, a convolution gathers (Ben-Nun and Hoefler 2019, section 6.2). Followed by one split by
its input channels, it needs one all-reduce forward and one backward, like fully connected layers. Layers that treat
each channel by itself may be between the two: normalisation, activations, pooling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import AlphaDropout, FeatureAlphaDropout, _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.functions import add_up, enter, gather, gather_terms, scatter
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, bounds, joined, keep, shown, sizes_of
from orchestray.trainers.parallel.tensor.region import inner_name, is_sequence
from orchestray.trainers.parallel.tensor.shapes import has_forward_of
from orchestray.trainers.parallel.tensor.tiles import AVERAGE_POOLS, CONVOLUTIONS, ELEMENTWISE, MAX_POOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.trainers.parallel.tensor.base import Split
    from orchestray.trainers.parallel.tensor.functions import GroupRef

_ADAPTIVE_POOLS = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def split_output_channels(module: nn.Module, name: str, split: Split) -> None:
    """Split a convolution so that each worker computes some of the output channels; the output stays split.

    The input may be whole, or split as a layer before left it. Batch, group and instance normalisation and PReLU after
    such a convolution get the same style: they keep the parameters and buffers of their channels.
    """
    if isinstance(module, _BatchNorm | _InstanceNorm | nn.GroupNorm | nn.PReLU):
        _split_channelwise(module, name, split)
        return
    layer = _convolution(module, name, "channels")
    ranges = bounds(name, "output channels", layer.out_channels, split)
    split.cuts.append(Cut(-_num_dims(layer) - 1, sizes_of(ranges)))
    _keep_outputs(layer, name, split, _OutputChannels)


def split_output_channels_gathered(module: nn.Module, name: str, split: Split) -> None:
    """Split a convolution by output channels, and all-gather them on every worker."""
    _keep_outputs(_convolution(module, name, "channels_gathered"), name, split, _OutputChannelsGathered)


def split_input_channels(module: nn.Module, name: str, split: Split) -> None:
    """Split a convolution so that each worker sees some of the input channels; an all-reduce sums the results.

    The bias is added once. The input may be whole, or split as a convolution of the style `channels` leaves it.
    """
    layer = _convolution(module, name, "channels_in")
    if layer.groups > 1:
        raise ConfigError(
            f"{shown(name)} is a grouped convolution, of which no output sees all input channels. Use the style "
            "'channels', which needs no all-reduce where the groups are split."
        )
    ranges = bounds(name, "input channels", layer.in_channels, split)
    changed = become(layer, _InputChannels)
    changed.group, changed.in_sizes = split.group, sizes_of(ranges)
    keep(layer, name, split, "weight", 1, ranges[split.rank])


def plan_channels(model: nn.Module, num_workers: int) -> dict[str, str]:
    """Return a plan for a model's convolutions that are children of an `nn.Sequential`, alone or one after another.

    Pairs become `channels` and `channels_in`, with the layers between them; a single one becomes `channels_gathered`.
    Convolutions with too few channels stay whole.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        if is_sequence(module) and not (parent is not None and is_sequence(parent)):
            _plan_chain(list(_leaves(module, name)), num_workers, plan)
    return plan


# -- plans -------------------------------------------------------------------------------------------------------------


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full_name = inner_name(name, child_name)
        if is_sequence(child):
            yield from _leaves(child, full_name)
        else:
            yield full_name, child


def _plan_chain(chain: list[tuple[str, nn.Module]], num_workers: int, plan: dict[str, str]) -> None:
    opened: dict[str, str] = {}
    """Plan since the convolution, its first entry, whose output is split now."""
    for name, module in [*chain, ("", nn.Flatten())]:
        if opened and isinstance(module, _ConvNd) and module.groups > 1 and _splits_on_groups(module, num_workers):
            opened[name] = "channels"
        elif opened and has_forward_of(module, CONVOLUTIONS) and cast(_ConvNd, module).groups == 1:
            plan.update({**opened, name: "channels_in"})
            opened = {}
        elif opened and (style := _style_between(module, num_workers)) is not None:
            opened.update({name: style} if style else {})
        else:
            if opened:
                plan[next(iter(opened))] = "channels_gathered"
            opened = {}
            if has_forward_of(module, CONVOLUTIONS) and _splits_on_groups(cast(_ConvNd, module), num_workers):
                opened = {name: "channels"}


def _style_between(module: nn.Module, num_workers: int) -> str | None:
    """Return the style of a module on split channels: "" if it needs none, None if it needs whole channels."""
    if isinstance(module, nn.GroupNorm):
        return "channels" if _on_borders(module.num_channels, module.num_groups, num_workers) else None
    if has_forward_of(module, (nn.PReLU,)) or isinstance(module, _BatchNorm | _InstanceNorm):
        return "channels"
    if isinstance(module, AlphaDropout | FeatureAlphaDropout):
        return None
    if isinstance(module, _DropoutNd):
        return "dropout" if module.p > 0 else ""
    return "" if has_forward_of(module, (*ELEMENTWISE, *MAX_POOLS, *AVERAGE_POOLS, *_ADAPTIVE_POOLS)) else None


def _splits_on_groups(layer: _ConvNd, num_workers: int) -> bool:
    if layer.out_channels < num_workers:
        return False
    return layer.groups == 1 or (
        _on_borders(layer.out_channels, layer.groups, num_workers)
        and _on_borders(layer.in_channels, layer.groups, num_workers)
    )


def _on_borders(num_channels: int, num_groups: int, num_workers: int) -> bool:
    """Return True if the workers' channels begin at the borders of channel groups."""
    width = num_channels // num_groups
    return num_groups >= num_workers and all(start % width == 0 for start, _ in split_evenly(num_channels, num_workers))


# -- layers ------------------------------------------------------------------------------------------------------------


class _OutputChannels(SplitModule):
    """A convolution that computes some of the output channels."""

    group: GroupRef
    plain_groups: int
    in_sizes: tuple[int, ...]
    out_sizes: tuple[int, ...]
    channel_dim: int

    def forward(self, x: Tensor) -> Tensor:
        dim, whole = self.channel_dim, sum(self.in_sizes)
        if x.shape[dim] != whole:
            _check_channels(x, dim, self.in_sizes, self.group().rank)
        if self.plain_groups == 1:  # every output channel sees every input channel
            entered = enter(x, self.group) if x.shape[dim] == whole else gather_terms(x, self.group, dim, self.in_sizes)
        else:
            entered = scatter(x, self.group, dim, self.in_sizes) if x.shape[dim] == whole else x
        return cast(Tensor, super().forward(entered))


class _OutputChannelsGathered(_OutputChannels):
    """A convolution that computes some of the output channels, and gathers all."""

    def forward(self, x: Tensor) -> Tensor:
        return gather(super().forward(x), self.group, self.channel_dim, self.out_sizes)


class _InputChannels(SplitModule):
    """A convolution that computes the part of every output channel from some of
    the input channels, and sums the parts.
    """

    group: GroupRef
    in_sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        layer = cast(Any, self)
        dim = -_num_dims(layer) - 1
        if x.shape[dim] == sum(self.in_sizes):
            x = scatter(x, self.group, dim, self.in_sizes)
        _check_channels(x, dim, self.in_sizes, self.group().rank)
        y = add_up(layer._conv_forward(x, layer.weight, None), self.group)
        return y if layer.bias is None else y + layer.bias.view(-1, *[1] * (-dim - 1))


def _keep_outputs(layer: _ConvNd, name: str, split: Split, kind: type[_OutputChannels]) -> None:
    ranges = bounds(name, "output channels", layer.out_channels, split)
    if layer.groups > 1 and not _splits_on_groups(layer, split.size):
        raise ConfigError(
            f"{shown(name)} has {layer.groups} groups of channels, which a tensor degree of {split.size} would cut "
            "through. Choose a degree that divides the number of groups, or leave the module out of the plan."
        )
    changed = become(layer, kind)
    changed.group, changed.plain_groups, changed.channel_dim = split.group, layer.groups, -_num_dims(layer) - 1
    changed.in_sizes = sizes_of(split_evenly(layer.in_channels, split.size))
    changed.out_sizes = sizes_of(ranges)
    for tensor in ("weight", "bias"):
        keep(layer, name, split, tensor, 0, ranges[split.rank])
    if layer.groups > 1:
        layer.groups = layer.groups * changed.out_sizes[split.rank] // layer.out_channels
        layer.in_channels = changed.in_sizes[split.rank]
    layer.out_channels = changed.out_sizes[split.rank]


def _split_channelwise(module: nn.Module, name: str, split: Split) -> None:
    """Split a module that treats every channel, or group of channels, by itself."""
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        split.partial.add(joined(name, "weight"))  # one slope for all channels: each worker sees only its own channels
        return
    layer = cast(Any, module)
    attribute = next(
        kind
        for kind in ("num_features", "num_channels", "num_parameters")
        if isinstance(getattr(layer, kind, None), int)
    )
    num_channels = int(getattr(layer, attribute))
    start, stop = bounds(name, "channels", num_channels, split)[split.rank]
    if isinstance(module, nn.GroupNorm):
        if not _on_borders(num_channels, module.num_groups, split.size):
            raise ConfigError(
                f"{shown(name)} normalises {module.num_groups} groups of channels, which a tensor degree of "
                f"{split.size} would cut through. Choose a degree that divides the number of groups."
            )
        module.num_groups = module.num_groups * (stop - start) // num_channels
    for tensor in ("weight", "bias", "running_mean", "running_var"):
        if getattr(layer, tensor, None) is not None:
            keep(module, name, split, tensor, 0, (start, stop))
    setattr(layer, attribute, stop - start)


def _convolution(module: nn.Module, name: str, style: str) -> _ConvNd:
    if isinstance(module, SplitModule):
        raise ConfigError(f"The plan splits the module {name!r} twice; give it one style.")
    if not has_forward_of(module, CONVOLUTIONS):
        raise ConfigError(
            f"The plan splits the module {name!r} in the style {style!r}, which is for nn.Conv1d, Conv2d and Conv3d; "
            f"it is a {type(module).__name__}."
        )
    return cast(_ConvNd, module)


def _num_dims(layer: _ConvNd) -> int:
    return len(layer.kernel_size)


def _check_channels(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> None:
    if x.shape[dim] != sizes[rank]:
        raise ConfigError(
            f"A convolution split over {len(sizes)} workers got {x.shape[dim]} channels, neither all {sum(sizes)} "
            f"nor this worker's {sizes[rank]}. See that the layer before it is split in the style 'channels', or not "
            "at all."
        )

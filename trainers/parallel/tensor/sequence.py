"""Activations split along the time between the split layers.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2. Outside its
split layers (in norms, dropout, residual sums) a transformer's block treats each position by itself. So each worker
does it for its part of the time. A layer split by output features gathers the time before. A layer split by input
features sums and keeps its part. The all-gather and the reduce-scatter together send the bytes of the all-reduce that
they replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.rng import draws
from orchestray.trainers.parallel.tensor.base import Region
from orchestray.trainers.parallel.tensor.dropout import SplitDropout, TimeWay, drop_split
from orchestray.trainers.parallel.tensor.functions import gather, scatter
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, joined, kind_of, shown

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split
    from orchestray.trainers.parallel.tensor.functions import GroupRef


class _Sequence(SplitModule):
    group: GroupRef
    region: Region
    does_enter: bool
    """True if it takes a whole input; otherwise it takes its part."""
    does_leave: bool
    """True if it returns a whole output."""
    name: str

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        if self.does_enter:
            self.region.length = x.shape[self.region.dim]
            x = scatter(x, self.group, self.region.dim, self.region.sizes)
        y = super().forward(x, *arguments, **options)
        if not isinstance(y, Tensor):
            raise TrainingError(
                f"{shown(self.name)} is split along the time (style 'sequence') and must return one tensor; it "
                f"returned a {type(y).__name__}. Leave it out of the plan."
            )
        return gather(y, self.group, self.region.dim, self.region.sizes) if self.does_leave else y


def split_sequence(module: nn.Module, name: str, split: Split) -> None:
    """Split the module's input and output along the time within it; its first argument is [samples, time, ...]."""
    if split.region_of(name) is not None:
        raise ConfigError(f"{shown(name)} is within a module that is split along the time already; say it of one.")
    time_first = any(isinstance(inner, nn.MultiheadAttention) and not inner.batch_first for inner in module.modules())
    begin_region(module, name, split, Region(0 if time_first else 1, split.size))


def begin_region(module: nn.Module, name: str, split: Split, region: Region) -> None:
    split.regions[name] = region
    made = become(module, _Sequence)
    made.group, made.region, made.name = split.group, region, name
    made.does_enter = made.does_leave = True


def link_regions(model: nn.Module, names: Sequence[str], split: Split) -> None:
    """Remove the gather between neighbours of an `nn.Sequential` that are both split along the time."""
    for parent_name, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential):
            continue
        before: _Sequence | None = None
        for child_name, child in parent.named_children():
            name = joined(parent_name, child_name)
            if name not in names or not isinstance(child, _Sequence):
                before = None
                continue
            if before is not None and before.region.dim == child.region.dim:
                before.does_leave = child.does_enter = False
                child.region = split.regions[name] = before.region
            before = child


def finish_regions(model: nn.Module, split: Split) -> None:
    """Adapt what is whole within a region, after all other styles: it sees only a part of the time."""
    for name, module in model.named_modules():
        region = split.region_of(name)
        if region is None:
            continue
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"{shown(name)} normalises over samples and time, which the style 'sequence' splits. Leave the part it "
                "is in whole."
            )
        if isinstance(module, _DropoutNd):
            if not isinstance(module, SplitDropout) or module.takes_whole:
                drop_split(module, name, split, TimeWay(region))
        elif draws(module) and not (isinstance(module, nn.MultiheadAttention) and isinstance(module, SplitModule)):
            raise ConfigError(
                f"{shown(name)} ({kind_of(module)}) draws random numbers, which the style 'sequence' cannot "
                "split. Use nn.Dropout in its place, or leave the part it is in whole."
            )
        cast(Any, module).splits_rows = not isinstance(module, _Sequence)  # one that computes on its part of the time
        for tensor in module._parameters:
            if joined(name, tensor) not in split.pieces:
                split.partial.add(joined(name, tensor))

"""Dropout of a split activation: the whole mask is drawn, as in one process, and this worker's part of it is used.

All workers of a tensor group draw the same numbers (`core.rng.seed_modules`), so the masks fit together. What is
dropped does not depend on the number of workers T. The price is drawing T times as many numbers as are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import AlphaDropout, FeatureAlphaDropout, _DropoutNd

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, kind_of, shown

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Region, Split


class Way(Protocol):
    """A way in which a tensor may arrive split."""

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        """Return the cut of `x`; None if it is not split in this way."""


class SplitDropout(SplitModule):
    """A dropout that gets a part of a tensor and draws for the whole."""

    ways: list[Way]
    rank: int
    name: str
    takes_whole: bool
    """True if it may be called with a whole tensor too."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        for way in self.ways:
            cut = way.cut(x, self.rank)
            if cut is not None:
                return drop_part(x, cut, self.rank, self._draw)
        if self.takes_whole:
            whole: Tensor = super().forward(x)
            return whole
        raise TrainingError(
            f"{shown(self.name)} is split as the layer before it, but was called with a tensor of shape "
            f"{list(x.shape)}, which is not split so. Leave it out of the plan, or use a dropout for each place."
        )

    def _draw(self, ones: Tensor) -> Tensor:
        return cast(Tensor, super().forward(ones))


def drop_part(x: Tensor, cut: Cut, rank: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Drop units of this worker's part of an activation.

    Args:
        x: this worker's part.
        cut: cut of the whole tensor.
        rank: this worker's rank.
        draw: drops units of a whole tensor.
    """
    shape = list(x.shape)
    shape[cut.dim] = sum(cut.sizes)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)  # numbers are drawn in the order of the memory
    with torch.no_grad():
        mask = draw(torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(1))
    return x * mask.narrow(cut.dim, sum(cut.sizes[:rank]), cut.sizes[rank])


class FixedWay:
    """A split that a layer before has left."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        return self._cut if self.fits(x.shape, rank) else None

    def fits(self, shape: Sequence[int], rank: int) -> bool:
        """Return True if a tensor of this shape may be this worker's part."""
        dim = self._cut.dim
        return -len(shape) <= dim < len(shape) and shape[dim] == self._cut.sizes[rank]


class HeadsWay:
    """A split of attention weights [samples, heads, targets, sources] by heads."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._cut = Cut(1, sizes)

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        return self._cut if x.dim() == 4 and x.shape[1] == self._cut.sizes[rank] else None


class TimeWay:
    """A split along the time."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        region = self._region
        fits = x.dim() > region.dim and x.shape[region.dim] == region.sizes[rank]
        return Cut(region.dim, region.sizes) if fits else None


def split_dropout(module: nn.Module, name: str, split: Split) -> None:
    """Split a dropout after a layer whose output stays split."""
    if not isinstance(module, _DropoutNd):
        raise ConfigError(
            f"The plan splits the module {name!r} in the style 'dropout', which is for nn.Dropout and its kin; it is a "
            f"{kind_of(module)}."
        )
    if not split.cuts:
        raise ConfigError(
            f"The plan splits the module {name!r} in the style 'dropout', but no layer before it leaves its output "
            "split (style 'output'). Leave it out of the plan: a dropout of whole activations needs no style."
        )
    drop_split(module, name, split, FixedWay(split.cuts[-1]), takes_whole=False)


def drop_split(module: _DropoutNd, name: str, split: Split, way: Way, *, takes_whole: bool = True) -> None:
    """Make a dropout draw for the whole of what arrives split in `way`; ways given earlier are tried first."""
    if isinstance(module, AlphaDropout | FeatureAlphaDropout):
        raise ConfigError(
            f"{shown(name)} is a {kind_of(module)}, which cannot be split. Leave the layers round it whole."
        )
    if isinstance(module, SplitDropout):
        module.ways.append(way)
        return
    made = become(module, SplitDropout)
    made.ways, made.rank, made.name, made.takes_whole = [way], split.rank, name, takes_whole

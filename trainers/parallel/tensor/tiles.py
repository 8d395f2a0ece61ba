"""Layers with a window, each on one tile of an image; `halo` exchanges the rows that a tile lacks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.halo import Range, Window, tiling_of, windowed
from orchestray.trainers.parallel.tensor.locality import LocallyConnected2d, Tiled
from orchestray.trainers.parallel.tensor.parts import SplitModule, become
from orchestray.trainers.parallel.tensor.region import inner_name

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid),
    *(nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Threshold),
)
_CONVOLVE: dict[int, Any] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MAX_POOL: dict[int, Any] = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGE_POOL: dict[int, Any] = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


RowHook = Callable[[Tensor, Sequence[int], Tensor], None]


class TileArea(Protocol):
    """The area that the tiles belong to."""

    split: Split
    dim: int

    @property
    def where(self) -> str:
        """Name of what is split, for errors."""

    def whole_size(self, name: str) -> int:
        """Return the number of rows of the whole input of the layer of that name, which is called now."""


def tile_all(module: nn.Module, area: TileArea, name: str, container: str) -> None:
    """Make every layer with a window, in `module` and below, work on tiles."""
    kind = next((mixin for kinds, mixin in _MIXINS if isinstance(module, kinds)), None)
    full_name = inner_name(container, name)
    if kind is None:
        for child_name, child in module.named_children():
            if not isinstance(child, _OnTile):
                tile_all(child, area, inner_name(name, child_name), container)
        return
    if isinstance(module, LocallyConnected2d):
        module.keep_rows(full_name, area.split)
    made = become(module, kind)
    made.place, made.row_hooks = (area, name, f"{area.where}, layer {full_name!r}"), OrderedDict()


def window_of(layer: nn.Module, dim: int) -> Window | None:
    """Return the window of a layer that is not split yet, along a dimension; None if it has none."""
    kind: Any = next((mixin for kinds, mixin in _MIXINS if isinstance(layer, kinds)), None)
    return kind.window(layer, dim) if kind is not None and issubclass(kind, _Windowed) else None


class _OnTile(SplitModule):
    """A module that works on this worker's tile."""

    place: tuple[TileArea, str, str]
    row_hooks: OrderedDict[int, RowHook]
    """Called with each part of the input, its padding, and the output of it: a layer is computed in several parts."""


class _Windowed(_OnTile):
    """A layer with a window."""

    fill = 0.0

    def forward(self, x: Tensor) -> Tensor:
        area, name, where = self.place
        size, group = area.whole_size(name), area.split.group()
        tiling = tiling_of(self.window(area.dim), size, group.size, where)
        return windowed(x, area.dim, tiling, group, partial(self.on_rows, size=size), self.fill)

    def window(self, dim: int) -> Window:
        raise NotImplementedError

    def on_rows(self, x: Tensor, outputs: Range, size: int) -> Tensor:
        """Apply the layer to exactly the rows under the windows of some outputs,
        without padding along the split dimension.
        """
        raise NotImplementedError


class _TiledConvolution(_Windowed):
    def window(self, dim: int) -> Window:
        layer = cast(nn.Conv2d, self)
        kernel, stride, dilation = layer.kernel_size[dim], layer.stride[dim], layer.dilation[dim]
        before, after = _same_padding(layer, dim)
        return Window(kernel, stride, before, after, dilation)

    def on_rows(self, x: Tensor, outputs: Range, size: int) -> Tensor:
        layer, dim = cast(nn.Conv2d, self), self.place[0].dim
        pads = [(0, 0) if d == dim else _same_padding(layer, d) for d in range(-num_dims(self), 0)]
        if any(before != after for before, after in pads):
            x = functional.pad(x, [side for pad in reversed(pads) for side in pad])
            pads = [(0, 0)] * len(pads)
        convolve = _CONVOLVE[num_dims(self)]
        padding = [before for before, _ in pads]
        y = convolve(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
        for hook in self.row_hooks.values():
            hook(x, padding, y)
        return cast(Tensor, y)


class _TiledMaxPool(_Windowed):
    fill = -float("inf")

    def window(self, dim: int) -> Window:
        kernel, stride, padding, dilation = (
            _sizes(self, what)[dim] for what in ("kernel_size", "stride", "padding", "dilation")
        )
        return Window(kernel, stride, padding, None, dilation, bool(self.ceil_mode))

    def on_rows(self, x: Tensor, outputs: Range, size: int) -> Tensor:
        padding = _without(_sizes(self, "padding"), self.place[0].dim)
        pool = _MAX_POOL[num_dims(self)]
        return cast(
            Tensor,
            pool(
                x,
                _sizes(self, "kernel_size"),
                _sizes(self, "stride"),
                padding,
                _sizes(self, "dilation"),
                self.ceil_mode,
            ),
        )


class _TiledAveragePool(_Windowed):
    def window(self, dim: int) -> Window:
        kernel, stride, padding = (_sizes(self, what)[dim] for what in ("kernel_size", "stride", "padding"))
        return Window(kernel, stride, padding, None, 1, bool(self.ceil_mode))

    def on_rows(self, x: Tensor, outputs: Range, size: int) -> Tensor:
        layer, dim = cast(nn.AvgPool2d, self), self.place[0].dim
        padding = _without(_sizes(self, "padding"), dim)
        options: list[Any] = [] if num_dims(self) == 1 else [layer.divisor_override]
        pool = _AVERAGE_POOL[num_dims(self)]
        y = pool(
            x,
            _sizes(self, "kernel_size"),
            _sizes(self, "stride"),
            padding,
            layer.ceil_mode,
            layer.count_include_pad,
            *options,
        )
        factors = self._factors(outputs, size)
        if factors is not None:
            y = y * y.new_tensor(factors).view(-1, *[1] * (-dim - 1))
        return cast(Tensor, y)

    def _factors(self, outputs: Range, size: int) -> list[float] | None:
        """Return, for each output row, the rows of its window divided by those in
        the plain layer's divisor; None if all are 1.
        """
        layer = cast(nn.AvgPool2d, self)
        if num_dims(self) > 1 and layer.divisor_override is not None:
            return None
        window = self.window(self.place[0].dim)
        factors = []
        for output in range(*outputs):
            start, stop = window.covered((output, output + 1))
            stop = min(stop, size + window.padding)
            if not layer.count_include_pad:
                start, stop = max(start, 0), min(stop, size)
            factors.append(window.kernel / (stop - start))
        return None if all(factor == 1.0 for factor in factors) else factors


class _TiledLocal(_Windowed):
    def window(self, dim: int) -> Window:
        layer = cast(LocallyConnected2d, self)
        return Window(layer.kernel_size[0], layer.stride[0])

    def on_rows(self, x: Tensor, outputs: Range, size: int) -> Tensor:
        layer = cast(LocallyConnected2d, self)
        return layer.of_rows(x, (outputs[0] - layer.first_row, outputs[1] - layer.first_row))


class _TiledTiles(_OnTile):
    def forward(self, x: Tensor) -> Tensor:
        area, name, where = self.place
        layer, split = cast(Tiled, self), area.split
        size = area.whole_size(name)
        if size % layer.num_tiles or layer.num_tiles % split.size:
            raise ConfigError(
                f"{where}: {size} rows in {layer.num_tiles} tiles cannot be shared evenly by {split.size} workers. The "
                "number of tiles must divide the rows, and be a multiple of strategy.network.tensor."
            )
        y = layer.tiles(x, range(*split_evenly(layer.num_tiles, split.size)[split.rank]))
        # Gives every worker a part of every weight's gradient, if only zeros.
        return cast(Tensor, cast(Any, _Used.apply)(y, *layer.parameters()))


class _Used(torch.autograd.Function):
    """A function that gives weights which a worker does not use a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return (dy, *(torch.zeros_like(weight) for weight in ctx.saved_tensors))


_MIXINS: tuple[tuple[Any, type[_OnTile]], ...] = (
    (CONVOLUTIONS, _TiledConvolution),
    (MAX_POOLS, _TiledMaxPool),
    (AVERAGE_POOLS, _TiledAveragePool),
    (LocallyConnected2d, _TiledLocal),
    (Tiled, _TiledTiles),
)


def num_dims(module: nn.Module) -> int:
    return int(next(base.__name__ for base in type(module).__mro__ if base in _ALL_WINDOWED)[-2])


_ALL_WINDOWED = (*CONVOLUTIONS, *MAX_POOLS, *AVERAGE_POOLS)


def _sizes(module: nn.Module, what: str) -> tuple[int, ...]:
    """Return an attribute, for which torch accepts one number or a tuple, as one number for each dimension."""
    value = getattr(module, what)
    return (value,) * num_dims(module) if isinstance(value, int) else tuple(value)


def _without(sizes: tuple[int, ...], dim: int) -> list[int]:
    """Return the sizes with 0 along `dim`."""
    changed = list(sizes)
    changed[dim] = 0
    return changed


def _same_padding(layer: nn.Conv2d, dim: int) -> tuple[int, int]:
    """Return the padding before and after along a dimension, counted from the end."""
    padding: Any = layer.padding
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
        return total // 2, total - total // 2
    return padding[dim], padding[dim]

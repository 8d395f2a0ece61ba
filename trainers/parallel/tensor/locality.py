"""Networks whose parts need little of each other: layers with weights by place, and tiles without a halo."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.parts import joined, keep

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split


class LocallyConnected2d(nn.Module):
    """A convolution whose weights differ from place to place (Coates et al. 2013, section 3; LeCun 1989).

    Weights are not shared: a worker that computes some rows of the output holds the weights of those rows alone. No
    gradient is sent. Split by `height`, only the rows of the input's halo are sent.

    Args:
        in_channels: channels of the input [samples, in_channels, *input_size].
        out_channels: channels of the output [samples, out_channels, *output_size].
        input_size: rows and columns of the input.
        kernel_size: rows and columns of a window.
        stride: steps between windows.
        bias: True to add a bias for each output channel and place.
        tile: rows and columns after which weights recur; None: never. See `TiledConv2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        input_size: tuple[int, int],
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        bias: bool = True,
        *,
        tile: int | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        self.stride = (stride, stride) if isinstance(stride, int) else stride
        rows, columns = (
            (size - kernel) // step + 1
            for size, kernel, step in zip(input_size, self.kernel_size, self.stride, strict=True)
        )
        if min(rows, columns) < 1:
            raise ConfigError(f"windows of {self.kernel_size} do not fit in an input of {tuple(input_size)}")
        self.output_size = (rows, columns)
        self.first_row = 0
        """Index of the first output row whose weights are held."""
        num_inputs = in_channels * math.prod(self.kernel_size)
        bound = 1 / math.sqrt(num_inputs)
        places = (rows, columns) if tile is None else (min(tile, rows), min(tile, columns))
        self.weight = nn.Parameter(torch.empty(*places, out_channels, num_inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(*places, out_channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.of_rows(x, (0, self.output_size[0]))

    def of_rows(self, x: Tensor, rows: tuple[int, int]) -> Tensor:
        """Return the output rows `rows`, counted among those held, from the input rows under their windows."""
        windows = functional.unfold(x, self.kernel_size, stride=self.stride)
        shape = (x.shape[0], windows.shape[1], rows[1] - rows[0], self.output_size[1])
        y = torch.einsum("nihw,hwoi->nohw", windows.view(shape), self._at_places(self.weight, rows))
        if self.bias is not None:
            y = y + self._at_places(self.bias, rows).permute(2, 0, 1)
        return y

    def _at_places(self, values: Tensor, rows: tuple[int, int]) -> Tensor:
        """Return the weights or biases of the places in some output rows."""
        return values[rows[0] : rows[1]]

    def keep_rows(self, name: str, split: Split) -> None:
        """Keep the weights of this worker's output rows; only this worker computes their gradient."""
        rows = split_evenly(self.output_size[0], split.size)[split.rank]
        self.first_row = rows[0]
        for kind in ("weight", "bias"):
            keep(self, name, split, kind, 0, rows)
            split.partial.discard(joined(name, kind))


class TiledConv2d(LocallyConnected2d):
    """A convolution whose weights recur every `tile` places only (Ngiam et al. 2010, "Tiled Convolutional Neural
    Networks", section 3).

    The output at (r, c) has the weights of (r mod tile, c mod tile). A tile of 1 makes a convolution, one of the
    output's size a `LocallyConnected2d`. Split by `height`, a worker holds all weights, whose gradients are added up,
    and the rows of the input's halo are sent; windows that do not overlap have none.

    Args:
        tile: rows and columns after which weights recur.
        in_channels, out_channels, input_size, kernel_size, stride, bias: as of a `LocallyConnected2d`.
    """

    def __init__(
        self,
        tile: int,
        in_channels: int,
        out_channels: int,
        input_size: tuple[int, int],
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        bias: bool = True,
    ) -> None:
        if tile < 1:
            raise ConfigError(f"weights that recur every {tile} places do not exist: a tile has 1 place or more")
        super().__init__(in_channels, out_channels, input_size, kernel_size, stride, bias, tile=tile)

    def _at_places(self, values: Tensor, rows: tuple[int, int]) -> Tensor:
        row = torch.arange(*rows, device=values.device) % values.shape[0]
        column = torch.arange(self.output_size[1], device=values.device) % values.shape[1]
        return values[row[:, None], column]

    def keep_rows(self, name: str, split: Split) -> None:
        """Keep all weights: the rows of every worker have a share in them."""


class Tiled(nn.Module):
    """Tiles of an image, each passed through a network that sees nothing of the others.

    Rows are cut in `num_tiles` equal tiles; tile t goes through `networks[t % len(networks)]`, so that weights are
    shared between some tiles, as those of a `TiledConv2d` are between places. Windows end at the border of a tile:
    there is no halo, and only the gradients of shared weights are sent between tiles.

    Args:
        networks: one network for each kind of tile.
        num_tiles: number of tiles, a multiple of the number of networks.
    """

    def __init__(self, networks: list[nn.Module], num_tiles: int) -> None:
        super().__init__()
        if num_tiles % len(networks):
            raise ConfigError(f"{num_tiles} tiles cannot be shared evenly by {len(networks)} networks")
        self.networks = nn.ModuleList(networks)
        self.num_tiles = num_tiles

    def forward(self, x: Tensor) -> Tensor:
        return self.tiles(x, range(self.num_tiles))

    def tiles(self, x: Tensor, tiles: range) -> Tensor:
        """Return the output of some tiles, one after another, from their rows."""
        rows = split_evenly(x.shape[-2], len(tiles))
        outputs = [
            self.networks[tile % len(self.networks)](x.narrow(-2, start, stop - start))
            for tile, (start, stop) in zip(tiles, rows, strict=True)
        ]
        return torch.cat(outputs, -2)

"""Layers with a window over tiles of an image: which rows a worker needs, and the exchange of those it lacks.

The rows (along the split dimension) of an input of `size` rows lie in tiles `split_evenly(size, workers)`; so do those
of the layer's output. A worker computes its output rows: the inner ones from its own tile while the halo is in flight,
the outer ones once it has come. Backward, the gradients of the halo's rows are sent back while those of the inner rows
are computed. Only the halo is sent (Ben-Nun and Hoefler 2019, section 6.2, spatial partitioning).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError

Range = tuple[int, int]
"""Rows as (start, stop)."""
Operation = Callable[[Tensor, Range], Tensor]
"""Function that computes output rows of a range of the whole output, from exactly
the rows that their windows cover (padding included).
"""


@dataclass(frozen=True)
class Window:
    """The window of a layer along the split dimension."""

    kernel: int
    stride: int = 1
    padding: int = 0
    padding_after: int | None = None
    """Padding after the rows, if it differs from `padding` before them."""
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def extent(self) -> int:
        """Number of rows from the first that a window covers to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        """Return the number of output rows for an input of `size` rows, as torch computes it."""
        after = self.padding if self.padding_after is None else self.padding_after
        room = size + self.padding + after - self.extent
        rows = -(-room // self.stride) if self.ceil_mode else room // self.stride
        if self.ceil_mode and rows * self.stride >= size + self.padding:
            rows -= 1  # a window must begin within the input or the padding before it
        return rows + 1

    def covered(self, outputs: Range) -> Range:
        """Return the rows that the windows of some output rows cover; rows below 0 and from `size` on are padding."""
        return outputs[0] * self.stride - self.padding, (outputs[1] - 1) * self.stride - self.padding + self.extent

    def rows(self, outputs: Range, size: int) -> Range:
        """Return the rows of the input that the windows of some output rows cover."""
        first, last = self.covered(outputs)
        start = min(max(first, 0), size)
        return start, max(min(last, size), start)


@dataclass(frozen=True)
class Tiling:
    """The rows of a layer's input and output on each worker, and which rows go where: the same on every worker."""

    window: Window
    size: int
    tiles: tuple[Range, ...]
    """Input rows of each worker."""
    outputs: tuple[Range, ...]
    """Output rows of each worker."""
    needed: tuple[Range, ...]
    """Input rows that each worker needs for its outputs."""

    def halo(self, receiver: int, sender: int) -> Range:
        """Return the rows of `sender` that `receiver` needs."""
        (start, stop), (first, last) = self.needed[receiver], self.tiles[sender]
        first = max(start, first)
        return first, max(min(stop, last), first)

    def inner(self, rank: int) -> Range:
        """Return the output rows of a worker that need only its own input rows; may be empty."""
        (start, stop), (first, last) = self.outputs[rank], self.tiles[rank]

        def is_inner(output: int) -> bool:
            rows = self.window.rows((output, output + 1), self.size)
            return rows[0] == rows[1] or (first <= rows[0] and rows[1] <= last)

        while start < stop and not is_inner(start):
            start += 1
        while stop > start and not is_inner(stop - 1):
            stop -= 1
        return start, stop


@lru_cache(maxsize=4096)
def tiling_of(window: Window, size: int, num_workers: int, where: str) -> Tiling:
    """Return how `num_workers` share a layer; `where` names layer and dimension in errors.

    Raises:
        ConfigError: there are fewer rows than workers, or a worker needs rows from beyond its neighbours.
    """
    num_outputs = window.output_size(size)
    for rows, what in ((size, "input"), (num_outputs, "output")):
        if rows < num_workers:
            raise ConfigError(
                f"{where}: the {what} has {rows} rows, too few for {num_workers} workers. End the split part of the "
                "network before this layer, or lower strategy.network.tensor."
            )
    tiles = tuple(split_evenly(size, num_workers))
    outputs = tuple(split_evenly(num_outputs, num_workers))
    needed = tuple(window.rows(rows, size) for rows in outputs)
    for rank, (start, stop) in enumerate(needed):
        first, last = tiles[max(rank - 1, 0)][0], tiles[min(rank + 1, num_workers - 1)][1]
        if start < stop and (start < first or stop > last):
            raise ConfigError(
                f"{where}: worker {rank} of {num_workers} needs rows {start} to {stop - 1} of {size}, more than its "
                f"neighbours' tiles hold (rows {first} to {last - 1}): a tile is smaller than the halo. End the split "
                "part of the network before this layer, or lower strategy.network.tensor."
            )
    return Tiling(window, size, tiles, outputs, needed)


def windowed(x: Tensor, dim: int, tiling: Tiling, group: Collective, operation: Operation, fill: float) -> Tensor:
    """Return this worker's rows of a layer's output.

    Args:
        x: this worker's tile of the input.
        dim: the split dimension, counted from the end.
        tiling: the layer's tiling (see `tiling_of`).
        group: the group of workers.
        operation: the layer without its padding along `dim`.
        fill: value of the padding.
    """
    if x.shape[dim] != tiling.tiles[group.rank][1] - tiling.tiles[group.rank][0]:
        raise ConfigError(
            f"A layer of {tiling.size} rows split over {group.size} workers got {x.shape[dim]} rows on worker "
            f"{group.rank}: what comes before it changes the image in a way that is not seen. Split a smaller part."
        )
    exchange = _HaloExchange(tiling, dim, group)
    own, above, below = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
    rows = _Rows(tiling, dim, group.rank, fill)
    (start, stop), inner = tiling.outputs[group.rank], tiling.inner(group.rank)
    parts: dict[int, Tensor] = {}
    if inner[0] < inner[1]:
        parts[1] = operation(rows.of(inner, own), inner)
    above, below = _Finish.apply(exchange, above, below)  # type: ignore[no-untyped-call]
    if inner[0] == inner[1]:
        return operation(rows.of((start, stop), own, above, below), (start, stop))
    if start < inner[0]:
        parts[0] = operation(rows.of((start, inner[0]), own, above, below), (start, inner[0]))
    if inner[1] < stop:
        parts[2] = operation(rows.of((inner[1], stop), own, above, below), (inner[1], stop))
    return parts[1] if len(parts) == 1 else torch.cat([parts[order] for order in sorted(parts)], dim)


@dataclass(frozen=True)
class _Rows:
    """A gatherer of the rows under some windows, from the own tile, the halo and padding."""

    tiling: Tiling
    dim: int
    rank: int
    fill: float

    def of(self, outputs: Range, own: Tensor, above: Tensor | None = None, below: Tensor | None = None) -> Tensor:
        tiling, rank = self.tiling, self.rank
        start, stop = tiling.window.rows(outputs, tiling.size)
        sources = [(own, tiling.tiles[rank])]
        if above is not None and above.shape[self.dim]:
            sources.insert(0, (above, tiling.halo(rank, rank - 1)))
        if below is not None and below.shape[self.dim]:
            sources.append((below, tiling.halo(rank, rank + 1)))
        parts = []
        for held, (first, last) in sources:
            a, b = max(start, first), min(stop, last)
            if a < b:
                parts.append(held.narrow(self.dim, a - first, b - a))
        x = torch.cat(parts, self.dim) if len(parts) > 1 else parts[0] if parts else own.narrow(self.dim, 0, 0)
        first, last = tiling.window.covered(outputs)
        before, after = max(min(0, last) - first, 0), max(last - max(tiling.size, first), 0)
        if before or after:
            x = functional.pad(x, [0, 0] * (-self.dim - 1) + [before, after], value=self.fill)
        return x


class _HaloExchange:
    """One layer's halo in flight: rows forward, their gradients back."""

    def __init__(self, tiling: Tiling, dim: int, group: Collective) -> None:
        self.tiling = tiling
        self.dim = dim
        self.group = group
        self.rows: Pending | None = None
        self.gradients: Pending | None = None
        self.received: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}
        rank = group.rank
        peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < group.size]
        self._given = {peer: tiling.halo(peer, rank) for peer in peers}
        self._taken = {peer: tiling.halo(rank, peer) for peer in peers}

    def send_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Start to send; return the memory that will hold the rows above and below."""
        self._sent = {peer: self._given_part(x, peer).contiguous() for peer in self._given}
        rank = self.group.rank
        above, below = (self._empty(x, self._taken.get(peer, (0, 0))) for peer in (rank - 1, rank + 1))
        received = {peer: part for peer, part in ((rank - 1, above), (rank + 1, below)) if peer in self._taken}
        self.rows = self.group.start_exchange(self._sent, received)
        return above, below

    def wait_rows(self) -> None:
        if self.rows is not None:
            self.rows.wait()
        self.rows, self._sent = None, {}

    def send_gradients(self, above: Tensor, below: Tensor) -> None:
        rank = self.group.rank
        self._sent = {
            peer: part.contiguous() for peer, part in ((rank - 1, above), (rank + 1, below)) if peer in self._taken
        }
        self.received = {peer: self._empty(above, rows) for peer, rows in self._given.items()}
        self.gradients = self.group.start_exchange(self._sent, self.received)

    def add_gradients(self, dx: Tensor) -> Tensor:
        if self.gradients is None:
            raise RuntimeError("the gradients of the halo were not sent")
        self.gradients.wait()
        arrived = {peer: part for peer, part in self.received.items() if part.numel()}
        if arrived:
            dx = dx.clone()
        for peer, part in arrived.items():
            self._given_part(dx, peer).add_(part)
        self.gradients, self.received, self._sent = None, {}, {}
        return dx

    def _given_part(self, x: Tensor, peer: int) -> Tensor:
        start, stop = self._given[peer]
        return x.narrow(self.dim, start - self.tiling.tiles[self.group.rank][0] if start < stop else 0, stop - start)

    def _empty(self, like: Tensor, rows: Range) -> Tensor:
        shape = list(like.shape)
        shape[self.dim] = rows[1] - rows[0]
        return like.new_empty(shape)


class _Start(torch.autograd.Function):
    """A function that sends the halo's rows forward. Its backward, a layer's last,
    waits for the gradients of rows sent away.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _HaloExchange) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        return (x.view_as(x), *exchange.send_rows(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own: Tensor, above: Tensor, below: Tensor) -> tuple[Tensor, None]:
        if ctx.exchange.gradients is None:  # this worker's outputs used only its own rows, so `_Finish` was not called
            ctx.exchange.send_gradients(above, below)
        return ctx.exchange.add_gradients(own), None


class _Finish(torch.autograd.Function):
    """A function that waits for the halo's rows forward. Its backward sends their
    gradients, before that of the inner rows.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _HaloExchange, above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.wait_rows()
        return above.view_as(above), below.view_as(below)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, below: Tensor) -> tuple[None, Tensor, Tensor]:
        ctx.exchange.send_gradients(above, below)
        return None, above, below

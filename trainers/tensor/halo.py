"""Layers with a window over tiles of an image: which rows a worker needs, and the exchange of those it lacks.

The rows (along the split dimension) of an input of `size` rows lie in tiles `split_evenly(size, workers)`, those of the
layer's output likewise. A worker computes its output rows: the inner ones from its own tile while the halo is on its
way, the outer ones when it has come. Backward, the gradients of the halo's rows go back to where the rows came from
while those of the inner rows are computed. What is sent is the halo and nothing else (Ben-Nun and Hoefler 2019,
section 6.2, spatial partitioning).
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

from orchestray.platform.collective import Collective, Pending
from orchestray.platform.errors import ConfigError
from orchestray.trainers.layout.pieces import split_evenly

Range = tuple[int, int]
"""Rows from and up to."""
Operation = Callable[[Tensor, Range], Tensor]
"""Output rows of a range of the whole output, from exactly the rows that their windows cover (padding included)."""


@dataclass(frozen=True)
class Window:
    """A layer's window along the split dimension."""

    kernel: int
    stride: int = 1
    padding: int = 0
    padding_after: int | None = None
    """Where it differs from `padding` before."""
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def extent(self) -> int:
        """Rows from the first a window covers to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        """Rows of the output of an input of `size` rows, as torch computes it."""
        after = self.padding if self.padding_after is None else self.padding_after
        room = size + self.padding + after - self.extent
        rows = -(-room // self.stride) if self.ceil_mode else room // self.stride
        if self.ceil_mode and rows * self.stride >= size + self.padding:
            rows -= 1  # a window must begin within the input or the padding before it
        return rows + 1

    def covered(self, outputs: Range) -> Range:
        """The rows that the windows of some output rows cover; below 0 and from `size` on lies padding."""
        return outputs[0] * self.stride - self.padding, (outputs[1] - 1) * self.stride - self.padding + self.extent

    def rows(self, outputs: Range, size: int) -> Range:
        """Those of them that are rows of the input."""
        first, last = self.covered(outputs)
        start = min(max(first, 0), size)
        return start, max(min(last, size), start)


@dataclass(frozen=True)
class Tiling:
    """Where the rows of a layer's input and output are, and which rows go where: the same on every worker."""

    window: Window
    size: int
    tiles: tuple[Range, ...]
    """Input rows of each worker."""
    outputs: tuple[Range, ...]
    """Output rows of each worker."""
    needed: tuple[Range, ...]
    """Input rows each worker needs for them."""

    def halo(self, receiver: int, sender: int) -> Range:
        """The rows of `sender` that `receiver` needs."""
        (start, stop), (first, last) = self.needed[receiver], self.tiles[sender]
        first = max(start, first)
        return first, max(min(stop, last), first)

    def inner(self, rank: int) -> Range:
        """Output rows of a worker that need no other's rows; may be empty."""
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
    """How `num_workers` share a layer; `where` names layer and dimension in errors.

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
    """This worker's rows of a layer's output.

    Args:
        x: this worker's tile of the input.
        dim: the split dimension, counted from the end.
        tiling: see `tiling_of`.
        group: the workers.
        operation: the layer without its padding along `dim`.
        fill: what the padding holds.
    """
    if x.shape[dim] != tiling.tiles[group.rank][1] - tiling.tiles[group.rank][0]:
        raise ConfigError(
            f"A layer of {tiling.size} rows split over {group.size} workers got {x.shape[dim]} rows on worker "
            f"{group.rank}: what comes before it changes the image in a way that is not seen. Split a smaller part."
        )
    flight = _Flight(tiling, dim, group)
    own, above, below = _Start.apply(x, flight)  # type: ignore[no-untyped-call]
    rows = _Rows(tiling, dim, group.rank, fill)
    (start, stop), inner = tiling.outputs[group.rank], tiling.inner(group.rank)
    parts: dict[int, Tensor] = {}
    if inner[0] < inner[1]:
        parts[1] = operation(rows.of(inner, own), inner)
    above, below = _Finish.apply(flight, above, below)  # type: ignore[no-untyped-call]
    if inner[0] == inner[1]:
        return operation(rows.of((start, stop), own, above, below), (start, stop))
    if start < inner[0]:
        parts[0] = operation(rows.of((start, inner[0]), own, above, below), (start, inner[0]))
    if inner[1] < stop:
        parts[2] = operation(rows.of((inner[1], stop), own, above, below), (inner[1], stop))
    return parts[1] if len(parts) == 1 else torch.cat([parts[order] for order in sorted(parts)], dim)


@dataclass(frozen=True)
class _Rows:
    """Puts together the rows under some windows."""

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


class _Flight:
    """One layer's halo on its way: rows forward, their gradients back."""

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
        """Start; returns the memory that the rows above and below will lie in."""
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
    """Forward sends the halo's rows. Backward comes last of a layer: it waits for the gradients of rows given away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> tuple[Tensor, Tensor, Tensor]:
        ctx.flight = flight
        return (x.view_as(x), *flight.send_rows(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own: Tensor, above: Tensor, below: Tensor) -> tuple[Tensor, None]:
        if ctx.flight.gradients is None:  # this worker's outputs used no other's rows, so `_Finish` was not called
            ctx.flight.send_gradients(above, below)
        return ctx.flight.add_gradients(own), None


class _Finish(torch.autograd.Function):
    """Forward waits for the halo's rows. Backward comes before that of the inner rows: it sends their gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        flight.wait_rows()
        return above.view_as(above), below.view_as(below)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, below: Tensor) -> tuple[None, Tensor, Tensor]:
        ctx.flight.send_gradients(above, below)
        return None, above, below

"""The survey's schemes for one fully connected layer over many workers, as plain functions with counts of their bytes.

Cannon's algorithm on a torus; the 1.5-dimensional product over a grid of weights and samples; the all-to-all exchange;
and redundant neurons that save messages. They serve as comparisons only: the styles of `parallel.tensor.base` split
models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective

# -- Cannon ------------------------------------------------------------------------------------------------------------


def cannon(a: Tensor, b: Tensor, torus: Collective) -> Tensor:
    """Return this worker's block of A B by shifts around a torus (Cannon 1969).

    Of q x q workers, the one of row i and column j (rank i q + j) holds block (i, j) of each matrix. First row i of A
    is shifted left by i, and column j of B up by j. Then both are shifted by one, q - 1 times, while the current blocks
    are multiplied. Each worker sends 2 (q - 1) blocks, and up to two to align. It holds two blocks of each matrix at a
    time, whereas gathering rows and columns would need q.

    Args:
        a: block [m, k].
        b: block [k, n].
        torus: q x q workers.

    Returns:
        Block [m, n] of the product.

    Raises:
        ValueError: the number of workers is not a square.
        PeerLostError: another worker is gone.
    """
    side = math.isqrt(torus.size)
    if side * side != torus.size:
        raise ValueError(f"Cannon's algorithm needs a square number of workers, got {torus.size}")
    row, column = divmod(torus.rank, side)
    a, b = _Shift(a, b, torus, side, row, column).arrived()
    product = a.new_zeros(a.shape[0], b.shape[1])
    for step in range(side):
        shift = _Shift(a, b, torus, side, 1, 1) if step < side - 1 else None
        product.addmm_(a, b)
        if shift is not None:
            a, b = shift.arrived()
    return product


def cannon_bytes(a_bytes: int, b_bytes: int, side: int, rank: int) -> int:
    """Return the bytes that a worker sends in `cannon`, given the bytes of its blocks."""
    row, column = divmod(rank, side)
    return (side - 1) * (a_bytes + b_bytes) + (a_bytes if row else 0) + (b_bytes if column else 0)


class _Shift:
    """A transfer of blocks of A to the left, and of B upwards."""

    def __init__(self, a: Tensor, b: Tensor, torus: Collective, side: int, left: int, up: int) -> None:
        row, column = divmod(torus.rank, side)
        self._sent = [a.contiguous(), b.contiguous()]
        self._blocks = list(self._sent)
        send, receive = {}, {}
        if left % side:
            self._blocks[0] = torch.empty_like(self._sent[0])
            send[row * side + (column - left) % side] = self._sent[0]
            receive[row * side + (column + left) % side] = self._blocks[0]
        if up % side:
            self._blocks[1] = torch.empty_like(self._sent[1])
            send[(row - up) % side * side + column] = self._sent[1]
            receive[(row + up) % side * side + column] = self._blocks[1]
        self._pending = torus.start_exchange(send, receive)

    def arrived(self) -> tuple[Tensor, Tensor]:
        self._pending.wait()
        return self._blocks[0], self._blocks[1]


# -- 1.5 dimensions ----------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """The workers of a layer: the weight is cut into `rows` parts by outputs, the batch into `columns` parts."""

    rows: int
    columns: int


class LayerShape(NamedTuple):
    """The sizes of a fully connected layer and its batch."""

    num_inputs: int
    num_outputs: int
    num_samples: int


class GridGroups(NamedTuple):
    """The groups of one worker; the worker of weight part i and batch part j has rank i * columns + j."""

    column: Collective
    """Workers with this worker's samples, one for each part of the weight."""
    row: Collective
    """Workers with this worker's part of the weight, one for each part of the batch."""


def grid_groups(world: Collective, grid: Grid) -> GridGroups:
    """Connect a worker's groups. All workers call."""
    if grid.rows * grid.columns != world.size:
        raise ValueError(f"a grid of {grid.rows} x {grid.columns} is not of {world.size} workers")
    row, column = divmod(world.rank, grid.columns)
    down = [index * grid.columns + column for index in range(grid.rows)]
    across = [row * grid.columns + index for index in range(grid.columns)]
    return GridGroups(world.subgroup(f"column-{column}", down), world.subgroup(f"row-{row}", across))


def forward_15d(weight: Tensor, x: Tensor, groups: GridGroups) -> Tensor:
    """Return Y = X W^T for a worker's samples, with all outputs (Gholami et al. 2018; one all-gather).

    Args:
        weight: this worker's outputs, [outputs / rows, inputs].
        x: its samples, [samples / columns, inputs].
        groups: the worker's groups.
    """
    parts = groups.column.all_gather(x @ weight.T)
    return torch.cat(parts.unbind(0), 1)


def backward_15d(weight: Tensor, x: Tensor, dy: Tensor, groups: GridGroups) -> tuple[Tensor, Tensor]:
    """Return the gradients of `weight` and of `x` (two all-reduces).

    Args:
        weight: this worker's outputs, [outputs / rows, inputs].
        x: its samples, [samples / columns, inputs].
        dy: gradient of all outputs for these samples, [samples / columns, outputs].
        groups: the worker's groups.
    """
    own = dy.chunk(groups.column.size, 1)[groups.column.rank]
    dx, dweight = (own @ weight).contiguous(), (own.T @ x).contiguous()
    groups.column.all_reduce(dx)
    groups.row.all_reduce(dweight)
    return dweight, dx


def grid_bytes(grid: Grid, layer: LayerShape, element_bytes: int = 4) -> float:
    """Return the bytes that a worker sends for a layer, forward and backward (Gholami et al. 2018)."""
    samples = layer.num_samples / grid.columns
    of_weights, of_batch = (grid.rows - 1) / grid.rows, (grid.columns - 1) / grid.columns
    gather = of_weights * samples * layer.num_outputs
    reduce_inputs = 2 * of_weights * samples * layer.num_inputs
    reduce_weights = 2 * of_batch * layer.num_inputs * layer.num_outputs / grid.rows
    return element_bytes * (gather + reduce_inputs + reduce_weights)


def grids(num_workers: int, layer: LayerShape | None = None) -> list[Grid]:
    """Return all factorisations of the number of workers; given a layer, those that divide its outputs and samples."""
    found = [Grid(rows, num_workers // rows) for rows in range(1, num_workers + 1) if num_workers % rows == 0]
    if layer is None:
        return found
    return [grid for grid in found if layer.num_outputs % grid.rows == 0 and layer.num_samples % grid.columns == 0]


def best_grid(num_workers: int, layer: LayerShape) -> Grid:
    """Return the grid that sends least; raise ValueError if no grid fits the layer."""
    fitting = grids(num_workers, layer)
    if not fitting:
        raise ValueError(f"no grid of {num_workers} workers divides the outputs and samples of {layer}")
    return min(fitting, key=lambda grid: grid_bytes(grid, layer))


# -- neurons -----------------------------------------------------------------------------------------------------------


def all_to_all_layer(weight: Tensor, block: Tensor, group: Collective) -> Tensor:
    """Return a worker's neurons of the next layer from every worker's of the last: P (P - 1) messages in all.

    Args:
        weight: weights of this worker's neurons, [neurons / P, inputs].
        block: this worker's inputs, [samples, inputs / P].
        group: P workers.
    """
    block = block.contiguous()
    blocks = {peer: torch.empty_like(block) for peer in range(group.size) if peer != group.rank}
    group.start_exchange(dict.fromkeys(blocks, block), blocks).wait()
    blocks[group.rank] = block
    return torch.cat([blocks[peer] for peer in range(group.size)], 1) @ weight.T


def redundant_layer(weight: Tensor, blocks: Tensor, group: Collective) -> Tensor:
    """Return the same as `all_to_all_layer`, with every neuron on two workers (Ben-Nun and Hoefler 2019, section 6.2).

    This halves the messages. Worker p computes blocks p and p + 1 (modulo P) of every layer. So the P - 2 blocks it
    lacks come from every second worker, two per message. That is P ceil((P - 2) / 2) messages in all, and twice the
    products.

    Args:
        weight: weights of this worker's neurons, those of block p and then those of block p + 1, [2 neurons / P,
        inputs].
        blocks: the same blocks of its inputs, [samples, 2 inputs / P].
        group: P workers, at least 2.
    """
    size, rank = group.size, group.rank
    width = blocks.shape[1] // 2
    held: dict[int, Tensor] = {rank: blocks[:, :width], (rank + 1) % size: blocks[:, width:]}
    send = {(rank - ahead) % size: blocks[:, : width * count].contiguous() for ahead, count in _messages(size)}
    receive = {
        (rank + ahead) % size: blocks.new_empty(blocks.shape[0], width * count) for ahead, count in _messages(size)
    }
    group.start_exchange(send, receive).wait()
    for ahead, count in _messages(size):
        for index, block in enumerate(torch.split(receive[(rank + ahead) % size], width, 1)[:count]):
            held[(rank + ahead + index) % size] = block
    return torch.cat([held[block] for block in range(size)], 1) @ weight.T


def _messages(size: int) -> Sequence[tuple[int, int]]:
    """Return the distance to each worker that sends something, and the number of blocks that it sends."""
    return [(ahead, min(2, size - ahead)) for ahead in range(2, size, 2)]

"""Shares that a worker will compute one after the other, read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.platform.data.stream import Share

if TYPE_CHECKING:
    from orchestray.platform.data.shares import ShareReader
    from orchestray.trainers.ps.protocol.assignments import Compute


@dataclass(frozen=True)
class _Neighbours:
    """Several shares that follow each other in an epoch, as one `ShareOrder`."""

    epoch: int
    step_in_epoch: int
    pieces: tuple[tuple[int, int], ...]
    batch_samples: int
    num_micro_batches: int


def read_together(reader: ShareReader, orders: Sequence[Compute]) -> list[Share]:
    """Read the samples of each order, with one read of the data for orders that are neighbours in the epoch.

    Returns:
        For each order the same as `reader.read` returns.
    """
    found: list[Share] = []
    for group in _neighbours(orders):
        first = group[0]
        if len(group) == 1:
            found.append(reader.read(first))
            continue
        pieces = tuple(piece for order in group for piece in order.pieces)
        neighbours = _Neighbours(first.epoch, first.step_in_epoch, pieces, first.batch_samples, first.num_micro_batches)
        read = reader.read(neighbours)
        rest, cut = read.micro_batches, read.cut
        for order in group:
            own, rest = rest[: len(order.pieces)], rest[len(order.pieces) :]
            found.append(Share(order.step_in_epoch, order.batch_samples, own, order.num_micro_batches, cut=cut))
            cut = None
    return found


def _neighbours(orders: Sequence[Compute]) -> list[list[Compute]]:
    """Split the orders into groups in which each order begins where the one before it ends."""
    groups: list[list[Compute]] = []
    for order in orders:
        last = groups[-1][-1] if groups else None
        if last is not None and last.epoch == order.epoch and last.pieces[-1][1] == order.pieces[0][0]:
            groups[-1].append(order)
        else:
            groups.append([order])
    return groups

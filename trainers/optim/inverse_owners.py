"""The workers that invert the factors of each layer, and those that hold the inverses.

J. G. Pauloski et al., "KAISA: An Adaptive Second-Order Optimizer Framework for Deep Neural Networks" (SC 2021),
section 3.1, where the fraction of the workers that hold a layer's inverses is `grad_worker_frac`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective

Owners = tuple[int, ...]
"""Ranks that hold a layer's inverses; the first of them computes them."""


def inversion_cost(sizes: Sequence[int]) -> int:
    """Return the work of inverting matrices of these sizes, in multiply-adds up to a constant."""
    return sum(size**3 for size in sizes)


def assign_owners(costs: Sequence[float], num_workers: int, fraction: float) -> list[Owners]:
    """Spread inversions over workers, the longest first, each to the worker that has least to do (Graham 1969).

    The longest total is at most 4/3 of the best one.

    Args:
        costs: cost of each layer's inversions.
        num_workers: number of workers.
        fraction: part of the workers that holds each layer's inverses, at least one of them.

    Returns:
        The owners of each layer: the worker that inverts, and those after it by rank, around the ring.
    """
    num_owners = min(num_workers, max(1, round(fraction * num_workers)))
    loads = [0.0] * num_workers
    owners: list[Owners] = [()] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        first = min(range(num_workers), key=lambda rank: (loads[rank], rank))
        loads[first] += costs[layer]
        owners[layer] = tuple((first + distance) % num_workers for distance in range(num_owners))
    return owners


def owner_for(owners: Owners, rank: int) -> int:
    """Return the worker that computes a layer's step for `rank`: itself if it holds the inverses."""
    return rank if rank in owners else owners[rank % len(owners)]


def deliver(
    replicas: Collective,
    own: Sequence[Tensor | None],
    sizes: Sequence[int],
    sources: Sequence[Sequence[int]],
    like: Tensor,
) -> list[Tensor | None]:
    """Send each item from the workers that have it to those that want it. All workers call.

    Args:
        replicas: all workers.
        own: the items that this worker has, flat; None in place of the others.
        sizes: number of elements of each item.
        sources: for each item and each rank, the rank that has it for this one; its own if it has it or needs none.
        like: a tensor of the dtype and on the device of the items.

    Returns:
        The items that this worker has or wants, flat; None in place of the others.
    """
    rank, items = replicas.rank, range(len(own))
    send: dict[int, Tensor] = {}
    receive: dict[int, Tensor] = {}
    for other in range(replicas.size):
        if other == rank:
            continue
        mine = [own[item] for item in items if sources[item][other] == rank]
        if parts := [part for part in mine if part is not None]:
            send[other] = torch.cat(parts)
        if size := sum(sizes[item] for item in items if sources[item][rank] == other):
            receive[other] = like.new_empty(size)
    replicas.start_exchange(send, receive).wait()
    found = list(own)
    for other, tensor in receive.items():
        chosen = [item for item in items if sources[item][rank] == other]
        for item, part in zip(chosen, torch.split(tensor, [sizes[item] for item in chosen]), strict=True):
            found[item] = part
    return found

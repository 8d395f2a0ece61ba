"""The spread of work over replicas by its cost, the replicas that hold each result, and its way to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm.flat_tensors import flatten, unflatten

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective


def spread(costs: Sequence[float], num_workers: int) -> list[int]:
    """Return the worker of each piece of work, such that the most loaded worker has little.

    The largest piece that is left goes to the worker with the least (longest processing time first, Graham 1969): at
    most 4/3 - 1/(3 workers) of the least load that is possible. Every caller with these arguments gets the same.

    Args:
        costs: cost of each piece.
        num_workers: number of workers.
    """
    loads = [0.0] * num_workers
    workers = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        workers[index] = min(range(num_workers), key=lambda worker: (loads[worker], worker))
        loads[workers[index]] += costs[index]
    return workers


def holders(owner: int, fraction: float, num_workers: int, first: int = 0) -> list[int]:
    """Return the workers that hold a result, its owner first.

    Args:
        owner: worker that computes it.
        fraction: fraction of the workers that hold it; at least the owner does.
        num_workers: number of workers.
        first: workers before this one come last, as they do other work.
    """
    count = max(1, round(fraction * num_workers))
    order = [(owner + offset) % num_workers for offset in range(num_workers)]
    return sorted(order, key=lambda worker: worker < first)[:count]


def send_from_holders(
    peers: Collective,
    holders_of: Sequence[Sequence[int]],
    tensors: Mapping[int, Sequence[Tensor]],
    receivers: Sequence[Sequence[int]],
) -> None:
    """Send each unit's tensors from its first holder to the receivers, in place. All peers call.

    Args:
        peers: replicas that hold the units.
        holders_of: replicas that hold each unit.
        tensors: contiguous tensors of this replica, by the unit: those to send, and memory for those to come.
        receivers: replicas that get each unit's.
    """
    size, rank = peers.size, peers.rank
    if size == 1:
        return
    outgoing: dict[int, list[Tensor]] = {}
    incoming: dict[int, list[Tensor]] = {}
    for index, (owners, others) in enumerate(zip(holders_of, receivers, strict=True)):
        if owners[0] == rank:
            for peer in others:
                outgoing.setdefault(peer, []).extend(tensors[index])
        elif rank in others:
            incoming.setdefault(owners[0], []).extend(tensors[index])
    send = {peer: flatten(parts) for peer, parts in outgoing.items()}
    receive = {peer: torch.empty_like(flatten(parts)) for peer, parts in incoming.items()}
    peers.start_exchange(send, receive).wait()
    for peer, parts in incoming.items():
        torch._foreach_copy_(parts, unflatten(receive[peer], parts))

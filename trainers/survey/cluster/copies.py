"""The way of a tensor between devices: direct, or staged through the memory of hosts, by hops and by copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.comm.allreduce.costs import AlphaBeta


@dataclass(frozen=True)
class Hop:
    """A hop from one memory to the next, which makes one copy."""

    name: str
    link: AlphaBeta


def path_s(hops: Sequence[Hop], num_bytes: float, num_chunks: int = 1) -> float:
    """Return the seconds of a tensor over hops, one after the other.

    In chunks, a hop carries one while the next hop carries the one before: the slowest sets the pace.

    Args:
        hops: hops of the path; each stores the whole chunk before the next sends it.
        num_bytes: bytes of the tensor.
        num_chunks: equal chunks that it is cut into.
    """
    times_s = [hop.link.time_s(num_bytes / num_chunks) for hop in hops]
    return sum(times_s) + (num_chunks - 1) * max(times_s, default=0.0)


def direct(link: AlphaBeta) -> list[Hop]:
    """Return the path between two GPUs with a link of their own."""
    return [Hop("GPU to GPU", link)]


def host_staged(bus: AlphaBeta, network: AlphaBeta) -> list[Hop]:
    """Return the path between GPUs of two machines without a direct link: GPU, host, host, GPU."""
    return [Hop("GPU to host", bus), Hop("host to host", network), Hop("host to GPU", bus)]


def through_object_store(bus: AlphaBeta, memory: AlphaBeta, network: AlphaBeta) -> list[Hop]:
    """Return the path through Ray's object store: an object is copied in when it is put, and read where it lies."""
    staged = host_staged(bus, network)
    return [staged[0], Hop("host to object store", memory), *staged[1:]]


@dataclass(frozen=True)
class Copies:
    """Copies of an array on its way through the object store of one machine."""

    put: int
    get: int


def object_store_copies(ray: Any, array: NDArray[np.float64]) -> Copies:
    """Put an array into the store, get it twice, and count the copies by the memory that the arrays share.

    Args:
        ray: the module, connected to a cluster.
        array: the array; its values are changed and put back.
    """
    reference = ray.put(array)
    first, second = ray.get(reference), ray.get(reference)
    before = first.copy()
    array += 1
    is_same_memory = bool(np.shares_memory(array, first) or not np.array_equal(before, first))
    array -= 1
    return Copies(put=int(not is_same_memory), get=int(not np.shares_memory(first, second)))

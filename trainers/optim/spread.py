"""The spread of work over replicas by its cost, and the replicas that hold each result."""

from __future__ import annotations

from collections.abc import Sequence


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

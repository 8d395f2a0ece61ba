"""The time of a graph on p processors: bounds (survey, section 2.3), and a greedy schedule between them.

A processor does one scalar operation in a unit of time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def least_time(work: int, depth: int, processors: int) -> float:
    """Return the time that no schedule on `processors` is below: max(W / p, D)."""
    return max(work / processors, float(depth))


def most_time(work: int, depth: int, processors: int) -> float:
    """Return the time that every greedy schedule keeps: W / p + D (Brent 1974)."""
    return work / processors + depth


def useful_processors(work: int, depth: int, efficiency: float = 0.5) -> int:
    """Return the most processors that Brent's bound keeps busy for a fraction of the time.

    With p processors the bound is W / p + D, of which W / p is work: the fraction is W / (W + p D).

    Args:
        work, depth: those of the graph.
        efficiency: fraction of the processors' time, above 0 and below 1.
    """
    if depth == 0:
        return max(1, work)
    return max(1, math.floor(work / depth * (1 - efficiency) / efficiency))


def greedy_time(needs: Sequence[Sequence[int]], processors: int) -> int:
    """Return the time of a greedy schedule of unit operations: no processor rests while an operation can run.

    Args:
        needs: numbers of the earlier operations that each operation needs.
        processors: number of processors.
    """
    missing = [len(set(each)) for each in needs]
    followers: list[list[int]] = [[] for _ in needs]
    for number, each in enumerate(needs):
        for need in set(each):
            followers[need].append(number)
    ready = [number for number, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    time = 0
    while ready:
        running = [heapq.heappop(ready) for _ in range(min(processors, len(ready)))]
        time += 1
        for number in running:
            for follower in followers[number]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    heapq.heappush(ready, follower)
    return time

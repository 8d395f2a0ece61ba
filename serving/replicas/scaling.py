"""The number of replicas that a load needs: a pure function of what the front measures."""

from __future__ import annotations

from dataclasses import dataclass

_BUSIEST = 0.85
"""Fraction of a replica's capacity to plan with: above it latency grows without bound."""
_SLACK = 0.8
"""Fraction of the target below which latency must stay to remove a replica: otherwise it would soon be back."""

IDLE_BEFORE_ZERO_S = 30.0
_LONGEST_START_S = 600.0
"""Seconds after which a starting first replica is not waited for, unless requests come."""


@dataclass(frozen=True)
class Load:
    """The arriving requests and the cost of batches."""

    rate_per_s: float
    """Arriving requests per second."""
    num_queued: int
    a_s: float
    """Seconds that a batch costs regardless of its size; 0 while no batch has run."""
    c_s: float
    """Seconds that each request adds."""
    max_batch_size: int
    idle_s: float = 0.0
    """Seconds without requests; restarts with a first replica, for clients that were asked to retry later."""
    has_runner: bool = True
    """True if a replica takes batches; otherwise the first is awaited, or none is wanted."""


@dataclass(frozen=True)
class ScalingGoal:
    """The bounds and the target of scaling."""

    least: int
    most: int
    target_latency_s: float
    idle_before_zero_s: float = IDLE_BEFORE_ZERO_S
    """Seconds without requests after which the last replica goes, if `least` is 0."""


def wanted_replicas(load: Load, num_replicas: int, goal: ScalingGoal) -> int:
    """Return the number of replicas that the load needs.

    That is the smallest number whose mean latency stays below the target and which works off the queue within it. One
    central queue is at least as good as a queue per replica, for which the latency is known (`mean_latency_s`).

    Args:
        load: measured load.
        num_replicas: replicas that exist or are starting.
        goal: bounds and target.
    """
    if num_replicas == 0:
        asked = load.num_queued > 0 or (load.rate_per_s > 0 and load.idle_s < goal.idle_before_zero_s)
        return max(goal.least, min(1, goal.most) if asked else 0)
    # Clients that were refused because a replica is still starting come again when it is there.
    patience_s = goal.idle_before_zero_s if load.has_runner else max(_LONGEST_START_S, goal.idle_before_zero_s)
    if load.num_queued == 0 and load.idle_s >= patience_s:
        return goal.least
    if load.a_s + load.c_s <= 0:
        return _bounded(num_replicas, goal)
    fewest = next((count for count in range(1, goal.most) if _suffices(load, count, goal.target_latency_s)), goal.most)
    if fewest < num_replicas:
        fewest = next(
            (n for n in range(fewest, num_replicas) if _suffices(load, n, goal.target_latency_s * _SLACK)),
            num_replicas,
        )
    return _bounded(fewest, goal)


def mean_latency_s(rate_per_s: float, a_s: float, c_s: float, max_batch_size: int) -> float:
    """Return an upper bound of the mean latency of Poisson arrivals at one server with batches of a + c b seconds.

    Y. Inoue, "Queueing analysis of GPU-based inference servers with dynamic batching: a closed-form characterization",
    Performance Evaluation 147, 2021, theorem 2; infinite above `_BUSIEST` of the capacity.

    Args:
        rate_per_s: arrivals per second.
        a_s, c_s: parameters of the service time.
        max_batch_size: largest batch.
    """
    if rate_per_s * (a_s / max_batch_size + c_s) >= _BUSIEST:
        return float("inf")
    busy = rate_per_s * c_s
    low = (a_s + c_s) / (2 * (1 - busy)) * (1 + 2 * rate_per_s * a_s + (1 - rate_per_s * a_s) / (1 + busy))
    high = 1.5 * a_s / (1 - busy) + (c_s / 2) * (busy + 2) / (1 - busy**2)
    return min(low, high)


def _suffices(load: Load, num_replicas: int, target_s: float) -> bool:
    batch_s = load.a_s + load.c_s * load.max_batch_size
    backlog_s = load.num_queued / load.max_batch_size * batch_s / num_replicas
    latency_s = mean_latency_s(load.rate_per_s / num_replicas, load.a_s, load.c_s, load.max_batch_size)
    alone_s = load.a_s + load.c_s
    # A target below the time of a single request cannot be met by any number: then only the capacity counts.
    return latency_s <= max(target_s, 1.5 * alone_s) and backlog_s <= max(target_s, 2 * batch_s)


def _bounded(count: int, goal: ScalingGoal) -> int:
    return max(1, goal.least, min(count, goal.most))

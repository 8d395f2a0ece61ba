"""The step of workers that exchange with parameter servers, as a queue in front of each server.

A worker computes, sends its gradient, waits its turn at the server, and gets the weights. Workers that do not wait for
each other make a closed queueing network. Its throughput follows exactly from mean value analysis if times are
exponential (Reiser and Lavenberg 1980, "Mean-value analysis of closed multichain queueing networks").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLoad:
    """The load of workers on their servers, for a share by each.

    Args:
        num_workers: workers.
        compute_s: seconds that a worker computes.
        transport_s: seconds that its gradient and the parameters are on their way, when nobody else is there.
        service_s: seconds in which a server applies its push; one push at a time.
        update_s: part of `service_s` that is once a step where workers wait for each other: the optimizer's update.
        chance_s: seconds that the slowest of the workers computes longer than a usual one.
        cpu_s: CPU seconds of a worker and its servers for a share.
        cores: cores that workers and servers share.
    """

    num_workers: int
    compute_s: float
    transport_s: float
    service_s: float
    update_s: float = 0.0
    chance_s: float = 0.0
    cpu_s: float = 0.0
    cores: int = 1


@dataclass(frozen=True)
class ServerStep:
    """A step: one share by each worker.

    Args:
        step_s: seconds of a step.
        queue_s: seconds that a worker waits for its turn, for others, or for a core.
        staleness: mean number of updates of others between a pull and the push.
    """

    step_s: float
    queue_s: float
    staleness: float = 0.0


def synchronous(load: ServerLoad) -> ServerStep:
    """Return the step of workers that all wait for the update."""
    others = load.num_workers - 1
    before_s = others * (load.service_s - load.update_s)
    alone_s = load.compute_s + load.transport_s + load.service_s
    shared_s = _shared_s(load) - others * load.update_s / load.cores
    step_s = max(alone_s + before_s + load.chance_s, shared_s)
    return ServerStep(step_s, step_s - alone_s)


def asynchronous(load: ServerLoad, *, push_every: int = 1, bound: int | None = None) -> ServerStep:
    """Return the step of workers of which each goes on as soon as it has its answer.

    Args:
        load: the load.
        push_every: shares between two pushes of a worker.
        bound: steps that the fastest may be ahead (stale-synchronous); None: no bound. Equal workers seldom meet it.
    """
    think_s = load.compute_s + load.transport_s
    response_s, queue = load.service_s, 0.0
    for count in range(1, load.num_workers + 1):
        response_s = load.service_s * (1 + queue)
        queue = count * response_s / (think_s + response_s)
    step_s = max(think_s + response_s, _shared_s(load))
    others = (load.num_workers - 1) / push_every
    stale = others if bound is None else min(others, float(bound * load.num_workers))
    return ServerStep(step_s, step_s - think_s - load.service_s, stale)


def _shared_s(load: ServerLoad) -> float:
    """Return the seconds in which the cores do the work of all workers and servers."""
    return load.num_workers * load.cpu_s / load.cores

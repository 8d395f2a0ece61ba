"""The step of workers that exchange with parameter servers, as a queue in front of each server.

A worker computes, sends its gradient, waits its turn at the server, and gets the weights. For workers that do not wait
for each other this is a closed queueing network, whose throughput mean value analysis gives exactly if times are
exponential (Reiser and Lavenberg 1980, "Mean-value analysis of closed multichain queueing networks").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLoad:
    """The load of workers on their servers.

    Args:
        num_workers: workers.
        compute_s: seconds that a worker computes on its share.
        message_s: seconds that a push or a pull takes at a server: a shard's part of the parameters.
        add_s: seconds in which a server adds one gradient to the sum, or applies it if it does not wait for others.
        update_s: seconds of an update of a shard.
        push_every: shares whose gradients a worker sums before it sends them.
        fetch_every: shares between two pulls.
        cores: cores that workers and servers share; a worker's own, if they are on other machines.
        num_servers: servers on those cores.
    """

    num_workers: int
    compute_s: float
    message_s: float
    add_s: float
    update_s: float
    push_every: int = 1
    fetch_every: int = 1
    cores: int = 1
    num_servers: int = 1


@dataclass(frozen=True)
class ServerStep:
    """A step: one share by each worker.

    Args:
        step_s: seconds of a step.
        exchange_s: seconds that a worker's messages take when it does not queue.
        queue_s: seconds that it waits for its turn, for others, or for a core.
        staleness: mean number of updates of others between a pull and the push.
    """

    step_s: float
    exchange_s: float
    queue_s: float
    staleness: float


def synchronous(load: ServerLoad) -> ServerStep:
    """Return the step of workers that all wait for the update."""
    serial_s = load.num_workers * (load.message_s + load.add_s)
    answers_s = load.num_workers * load.message_s
    critical_s = load.compute_s + serial_s + load.update_s + answers_s
    step_s = max(critical_s, _cpu_s(load))
    own_s = 2 * load.message_s + load.add_s
    return ServerStep(step_s, own_s, step_s - load.compute_s - own_s - load.update_s, 0.0)


def asynchronous(load: ServerLoad, bound: int | None = None) -> ServerStep:
    """Return the step of workers of which each goes on as soon as it has its answer.

    Args:
        load: the load.
        bound: steps that the fastest may be ahead (stale-synchronous); None: no bound. Equal workers seldom meet it.
    """
    visits = 1 / load.push_every
    service_s = visits * (load.message_s + load.update_s + load.add_s) + load.message_s / load.fetch_every
    response_s, queue = service_s, 0.0
    for count in range(1, load.num_workers + 1):
        response_s = service_s * (1 + queue)
        queue = count * response_s / (load.compute_s + response_s)
    step_s = max(load.compute_s + response_s, _cpu_s(load))
    others = (load.num_workers - 1) / load.push_every
    limit = others if bound is None else min(others, float(bound * load.num_workers))
    return ServerStep(step_s, service_s, step_s - load.compute_s - service_s, limit)


def _cpu_s(load: ServerLoad) -> float:
    """Return the seconds of a step in which the cores do the work of all workers and servers."""
    visits, fetches = 1 / load.push_every, 1 / load.fetch_every
    messages_s = 2 * load.message_s * (visits + fetches)  # at both ends
    each_s = load.compute_s + load.num_servers * (messages_s + visits * load.add_s)
    return (load.num_workers * each_s + load.num_servers * load.update_s) / min(
        load.cores, load.num_workers + load.num_servers
    )

"""Training steps of many workers in virtual time, and the closed form of the duration of each scheme.

Nothing is computed: a step is `compute_s` of waiting and a message of `num_bytes`, which takes no memory. T is
num_bytes / bandwidth, the time that a port is busy with a message; alpha is the latency; W is the number of workers, S
that of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.sim.network import Link, SimulatedChannel, SimulatedNetwork, lockstep_round

Steps = Generator[Any, Any, None]
_NUM_RINGS = 3
"""Number of peers of a node in gossip SGD, about three in Ben-Nun and Hoefler (2019), section 7.2."""


@dataclass(frozen=True)
class Load:
    """The load of a simulation."""

    num_workers: int
    num_steps: int
    num_bytes: int
    compute_s: float = 0.0

    def weightless(self) -> Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation."""

    finish_s: float
    num_messages: int
    num_bytes: int


def parameter_server(load: Load, link: Link) -> Simulated:
    """Simulate one server: each worker computes, pushes, and continues when it has pulled.

    Every message is simulated, and each node receives one at a time: all workers wait for the server's port.
    """
    network, tensor = SimulatedNetwork(link, ports="node"), load.weightless()

    def worker(end: SimulatedChannel) -> Callable[[], Steps]:
        def steps() -> Steps:
            for _ in range(load.num_steps):
                if load.compute_s:
                    yield network.sleep(load.compute_s)
                end.isend(tensor, tag="push")
                yield end.irecv(tag="pull")  # by then the push has left

        return steps

    def serve(end: SimulatedChannel) -> Callable[[], Steps]:
        def steps() -> Steps:
            for _ in range(load.num_steps):
                yield end.irecv(tag="push")
                end.isend(tensor, tag="pull")  # its port sends one after the other, and the server does not wait for it

        return steps

    for rank in range(load.num_workers):
        here, there = network.pair(f"worker/{rank}", "server")
        network.start(f"worker/{rank}", worker(here))
        network.start("server", serve(there))
    return _result(network)


def parameter_server_s(load: Load, link: Link) -> float:
    """Return C + (W - 1) T + (S - 1) max(W T, C).

    C = compute + 2 alpha + 2 T is the step time of a single worker. The first pushes queue for the server's port, and
    the last worker is W - 1 of them behind. From then on a step takes the port's time for all workers or a worker's own
    time, whichever is longer.
    """
    transfer_s = load.num_bytes / link.bandwidth_bytes_per_s
    alone_s = load.compute_s + 2 * link.latency_s + 2 * transfer_s
    period_s = max(load.num_workers * transfer_s, alone_s)
    return alone_s + (load.num_workers - 1) * transfer_s + (load.num_steps - 1) * period_s


def gossip(load: Load, link: Link, seed: int = 0) -> Simulated:
    """Simulate gossip: in each step every worker sends to one worker and receives from one.

    The pairs of a step come from a ring of all workers in random order, drawn in each step from three rings. Every
    message is simulated, and a worker waits only for the one that it receives from.
    """
    network, tensor, dice = SimulatedNetwork(link, ports="node"), load.weightless(), random.Random(seed)
    workers = range(load.num_workers)
    rings = [dice.sample(workers, load.num_workers) for _ in range(_NUM_RINGS)]
    following = [dict(zip(ring, ring[1:] + ring[:1], strict=True)) for ring in rings]
    previous = [{after: before for before, after in ring.items()} for ring in following]
    drawn = [dice.randrange(_NUM_RINGS) for _ in range(load.num_steps)]
    ends: dict[tuple[int, int], SimulatedChannel] = {}
    for ring in following:
        for left, right in ring.items():
            if (left, right) not in ends:
                ends[left, right], ends[right, left] = network.pair(f"worker/{left}", f"worker/{right}")

    def worker(rank: int) -> Callable[[], Steps]:
        def steps() -> Steps:
            for which in drawn:
                if load.compute_s:
                    yield network.sleep(load.compute_s)
                to, source = following[which][rank], previous[which][rank]
                sent = ends[rank, to].isend(tensor)
                yield ends[rank, source].irecv(), sent

        return steps

    for rank in workers:
        network.start(f"worker/{rank}", worker(rank))
    return _result(network)


def gossip_s(load: Load, link: Link) -> float:
    """Return S (compute + alpha + T), which does not depend on the number of workers."""
    return load.num_steps * (load.compute_s + _model(link).time_s(load.num_bytes))


def ring(load: Load, link: Link) -> Simulated:
    """Simulate a ring all-reduce per step, round by round; with 1,000 workers a step has 2 million messages."""
    ready_s = np.zeros(load.num_workers)
    sender_of = np.arange(load.num_workers) - 1
    rounds = 2 * (load.num_workers - 1)
    part_bytes = load.num_bytes / load.num_workers
    for _ in range(load.num_steps):
        ready_s += load.compute_s
        for _ in range(rounds):
            ready_s = lockstep_round(ready_s, sender_of, part_bytes, link)
    num_messages = load.num_steps * rounds * load.num_workers
    return Simulated(float(ready_s.max(initial=0.0)), num_messages, load.num_steps * rounds * load.num_bytes)


def ring_s(load: Load, link: Link) -> float:
    """Return S (compute + 2 (W - 1) (alpha + T / W))."""
    return load.num_steps * (load.compute_s + cost_s("ring", load.num_workers, load.num_bytes, _model(link)))


def _model(link: Link) -> AlphaBeta:
    return AlphaBeta(link.latency_s, 1 / link.bandwidth_bytes_per_s)


def _result(network: SimulatedNetwork) -> Simulated:
    finish_s = network.run()
    traffic = network.traffic.values()
    return Simulated(finish_s, sum(t.num_messages for t in traffic), sum(t.num_bytes for t in traffic))

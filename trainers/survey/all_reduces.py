"""All-reduces in virtual time, message by message: beside their lower bounds, and with ranks placed by their nodes.

Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 2.5. The schedules are those
that runs execute. A message of n bytes takes L + n G on the simulated network, exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestray.platform.comm.allreduce.bounds import bandwidth_bound_s, latency_bound_s, no_redundancy_bytes
from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.comm.allreduce.execute import exchanges
from orchestray.platform.comm.allreduce.placement import order_by_node, placed_schedule
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS
from orchestray.platform.sim.network import Link, SimulatedNetwork

MODEL = AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-6)
LINK = Link(MODEL.alpha_s, 1 / MODEL.beta_s_per_byte)
SIZES = (2, 4, 8, 16)
SMALL, LARGE = 16, 2**20
"""Bytes: where latency is nearly all, and where bandwidth is."""
NEAR, FAR = Link(1e-5, 1e9), Link(1e-3, 1e7)
"""Links within a node, and between nodes."""
NODES = tuple(node for node in "abcd" for _ in range(4))
"""The node of each of 16 ranks, four on each."""


def weightless(num_bytes: int) -> Tensor:
    """Return a tensor that costs its bytes on the wire, and no memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def simulate(
    algorithm: str,
    tensors: Sequence[Tensor],
    link: Link | Callable[[str, str], Link] = LINK,
    order: Sequence[int] | None = None,
) -> tuple[float, SimulatedNetwork]:
    """Run an all-reduce, and return the time at which the last rank has the result, and the network it ran on.

    Args:
        algorithm: one of `ALGORITHMS`, or "star" for a parameter server on the first place.
        tensors: tensor of each rank, summed in place; or weightless ones.
        link: link between any two ranks, which have their numbers as names.
        order: ranks in the order of their places in the schedule; None: that of their numbers.
    """
    size = len(tensors)
    order = range(size) if order is None else order
    network = SimulatedNetwork(link)
    ends: list[dict[int, Any]] = [{} for _ in range(size)]
    for left in range(size):
        for right in range(left + 1, size):
            ends[left][right], ends[right][left] = network.pair(str(left), str(right))
    for rank, tensor in enumerate(tensors):
        steps = placed_schedule(algorithm, rank, order, tensor.numel())

        def program(rank: int = rank, tensor: Tensor = tensor, steps: Any = steps) -> Any:
            yield from exchanges(ends[rank], tensor, steps)

        network.start(str(rank), program)
    return network.run(), network


@dataclass(frozen=True)
class Measured:
    """An all-reduce in virtual time, beside the bounds."""

    algorithm: str
    size: int
    num_bytes: int
    seconds: float
    most_sent: int
    """Bytes that the busiest rank sends."""

    @property
    def of_latency_bound(self) -> float:
        """Its time over L log2 P."""
        return self.seconds / latency_bound_s(self.size, MODEL)

    @property
    def of_bandwidth_bound(self) -> float:
        """Its time over n G."""
        return self.seconds / bandwidth_bound_s(self.size, self.num_bytes, MODEL)

    @property
    def of_no_redundancy_bytes(self) -> float:
        """Bytes of its busiest rank over 2 n (P - 1)/P."""
        return self.most_sent / no_redundancy_bytes(self.size, self.num_bytes)

    @property
    def latencies(self) -> float:
        """Its time less that of the bytes of its busiest rank, over L."""
        return (self.seconds - self.most_sent * MODEL.beta_s_per_byte) / MODEL.alpha_s


def measured(sizes: Iterable[int] = SIZES, messages: Iterable[int] = (SMALL, LARGE)) -> list[Measured]:
    """Return every all-reduce for all numbers of ranks and sizes of the tensor.

    In each of these a rank sends one message at a time and receives one, as the bounds have it. A server that receives
    from all ranks at once is none of them: latencies of many messages pass at the same time.
    """
    return [_measured(name, size, n) for n in messages for size in sizes for name in ALGORITHMS]


def _measured(algorithm: str, size: int, num_bytes: int) -> Measured:
    seconds, network = simulate(algorithm, [weightless(num_bytes)] * size)
    sent = [
        sum(traffic.num_bytes for (sender, _), traffic in network.traffic.items() if sender == str(rank))
        for rank in range(size)
    ]
    return Measured(algorithm, size, num_bytes, seconds, max(sent))


def findings(found: Sequence[Measured]) -> list[str]:
    """Return a sentence on each of the three bounds."""
    by_time = min(found, key=lambda each: round(each.of_latency_bound, 9))
    by_bytes = min(found, key=lambda each: round(each.of_bandwidth_bound, 9))
    too_soon = sum(each.of_latency_bound < 1 for each in found)
    too_few = sum(each.of_bandwidth_bound < 1 or each.most_sent < each.num_bytes for each in found)
    whole = [each for each in found if each.algorithm == "rabenseifner"]
    of_bytes = {f"{each.of_no_redundancy_bytes:.3f}" for each in whole}
    of_latency = {f"{each.latencies * MODEL.alpha_s / latency_bound_s(each.size, MODEL):.3f}" for each in whole}
    sent, latency = " to ".join(sorted(of_bytes)), " to ".join(sorted(of_latency))
    near_time = f"the nearest, {by_time.algorithm} on {by_time.size} ranks, takes {by_time.of_latency_bound:.4f}"
    near_bytes = f"the nearest, {by_bytes.algorithm} on {by_bytes.size} ranks, takes {by_bytes.of_bandwidth_bound:.4f}"
    less = "take less than n G, or send less than n bytes from the busiest rank"
    return [
        f"{too_soon} of {len(found)} take less than L log2 P; {near_time} times that.",
        f"{too_few} of {len(found)} {less}; {near_bytes} times that.",
        f"Rabenseifner's sends {sent} times 2 n (P - 1)/P bytes from each rank, in {latency} times L log2 P.",
    ]


class Crossed(NamedTuple):
    """The traffic of an all-reduce between nodes, and its time."""

    messages: int
    num_bytes: int
    seconds: float


def crossed(algorithm: str, nodes: Sequence[str], order: Sequence[int], num_bytes: int = 1600) -> Crossed:
    """Run an all-reduce over nodes with slow links between them, and count what goes over those.

    Args:
        algorithm: one of `ALGORITHMS`.
        nodes: node of each rank.
        order: ranks in the order of their places in the schedule.
        num_bytes: bytes of the tensor.
    """

    def link(sender: str, receiver: str) -> Link:
        return NEAR if nodes[int(sender)] == nodes[int(receiver)] else FAR

    seconds, network = simulate(algorithm, [weightless(num_bytes)] * len(nodes), link, order)
    far = [
        traffic for (sender, receiver), traffic in network.traffic.items() if nodes[int(sender)] != nodes[int(receiver)]
    ]
    return Crossed(sum(one.num_messages for one in far), sum(one.num_bytes for one in far), seconds)


def placements(draws: int = 20, seed: int = 0) -> Mapping[str, tuple[list[Crossed], list[Crossed]]]:
    """Return for each algorithm the runs with ranks that lie at random on four nodes: as they lie, and mapped by node.

    Args:
        draws: clusters whose ranks are drawn.
        seed: seed of the draws.
    """
    dice = random.Random(seed)
    clusters = [dice.sample(NODES, len(NODES)) for _ in range(draws)]
    return {
        algorithm: (
            [crossed(algorithm, nodes, range(len(nodes))) for nodes in clusters],
            [crossed(algorithm, nodes, order_by_node(nodes)) for nodes in clusters],
        )
        for algorithm in ALGORITHMS
    }


def rows_of_placements(found: Mapping[str, tuple[list[Crossed], list[Crossed]]]) -> list[list[Any]]:
    """Return a row for each algorithm: messages, bytes and milliseconds in the mean, at random and mapped."""
    return [
        [
            algorithm,
            *(fmean(each.messages for each in kind) for kind in kinds),
            *(fmean(each.num_bytes for each in kind) for kind in kinds),
            *(1e3 * fmean(each.seconds for each in kind) for kind in kinds),
        ]
        for algorithm, kinds in found.items()
    ]

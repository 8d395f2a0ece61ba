"""A network of two levels in virtual time: rounds of messages between workers, vectorised over the workers.

A message of n bytes takes alpha + n beta, as in `platform.sim.network`. Its sender's port is busy for n beta, and the
message occupies the receiver's port at the same time as it arrives. Workers of a node have near links; between nodes
there are far links. A node has one port to the other nodes, which its workers share, or one for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.comm.allreduce.costs import AlphaBeta

Seconds = NDArray[np.float64]
Ranks = NDArray[np.intp]
Placement = Literal["packed", "scattered", "random"]


@dataclass(frozen=True)
class Network:
    """Workers, their nodes and links. Workers are numbered by their places in the schedules of exchanges.

    Args:
        num_workers: workers of the cluster, at least 1.
        near: time of a message between workers of a node.
        far: time of a message between nodes; default: that of `near`.
        workers_per_node: workers of a node; 0: all workers are on one node.
        placement: packed: workers with neighbouring numbers share a node; scattered: worker i is on node i mod nodes;
            random: drawn.
        shares_port: True if the workers of a node send to other nodes through one port.
        seed: seed of a random placement.
    """

    num_workers: int
    near: AlphaBeta
    far: AlphaBeta | None = None
    workers_per_node: int = 0
    placement: Placement = "packed"
    shares_port: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.workers_per_node < 0:
            raise ValueError(f"a cluster has at least 1 worker and no negative numbers, got {self}")

    @property
    def num_nodes(self) -> int:
        return -(-self.num_workers // self.workers_per_node) if self.workers_per_node else 1

    @cached_property
    def nodes(self) -> Ranks:
        """Node of each worker, [num_workers]."""
        ranks = np.arange(self.num_workers)
        if self.num_nodes == 1:
            return np.zeros_like(ranks)
        if self.placement == "scattered":
            return ranks % self.num_nodes
        packed = ranks // self.workers_per_node
        return packed if self.placement == "packed" else np.random.default_rng(self.seed).permutation(packed)

    @property
    def is_uniform(self) -> bool:
        """True if all links are alike, and no port is shared."""
        return self.num_nodes == 1 or (self.far in (None, self.near) and not self.shares_port)

    def link(self, *, is_far: bool) -> AlphaBeta:
        return (self.far or self.near) if is_far else self.near

    def round(self, senders: Ranks, receivers: Ranks, num_bytes: float | Seconds) -> Round:
        """Return a round of messages; a worker sends one message at most, and receives one at most.

        Args:
            senders: sender of each message, [messages].
            receivers: receiver of each message, [messages].
            num_bytes: bytes of each message, or of all alike.
        """
        sizes = np.broadcast_to(np.asarray(num_bytes, dtype=np.float64), senders.shape)
        from_node, to_node = self.nodes[senders], self.nodes[receivers]
        is_far = from_node != to_node
        near, far = self.link(is_far=False), self.link(is_far=True)
        busy = sizes * np.where(is_far, far.beta_s_per_byte, near.beta_s_per_byte)
        if self.shares_port and is_far.any():
            out, into = (np.bincount(ends[is_far], minlength=self.num_nodes) for ends in (from_node, to_node))
            busy = np.where(is_far, busy * np.maximum(out[from_node], into[to_node]), busy)
        alpha = np.where(is_far, far.alpha_s, near.alpha_s)
        near_bytes, far_bytes = float(sizes[~is_far].sum()), float(sizes[is_far].sum())
        return Round(senders, receivers, busy, alpha + busy, Bytes(near_bytes, far_bytes))


@dataclass(frozen=True)
class Bytes:
    """Bytes by the kind of link that carries them."""

    near: float = 0.0
    far: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.near + other.near, self.far + other.far)

    def times(self, factor: float) -> Bytes:
        return Bytes(self.near * factor, self.far * factor)


@dataclass(frozen=True)
class Round:
    """The messages of a round: seconds that the sender is busy, and seconds until each has arrived."""

    senders: Ranks
    receivers: Ranks
    busy_s: Seconds
    arrival_s: Seconds
    num_bytes: Bytes

    def after(self, ready_s: Seconds) -> Seconds:
        """Return the time at which each worker is done with the round.

        Args:
            ready_s: time at which each worker begins it, [num_workers].
        """
        done_s, begins_s = ready_s.copy(), ready_s[self.senders]
        done_s[self.senders] = begins_s + self.busy_s
        done_s[self.receivers] = np.maximum(done_s[self.receivers], begins_s + self.arrival_s)
        return done_s

    def repeated(self, ready_s: Seconds, times: int) -> Seconds:
        """Return the time at which each worker is done with a round from every worker to the next, done many times."""
        done_s = ready_s.copy()
        arrives_s = np.empty_like(done_s)
        for _ in range(times):
            np.add(done_s, self.arrival_s, out=arrives_s)
            np.add(done_s, self.busy_s, out=done_s)
            np.maximum(done_s[1:], arrives_s[:-1], out=done_s[1:])
            done_s[0] = max(done_s[0], arrives_s[-1])
        return done_s


@dataclass(frozen=True)
class Exchange:
    """Rounds that follow one another, each with the number of times that it is done."""

    rounds: Sequence[tuple[Round, int]]

    @cached_property
    def num_bytes(self) -> Bytes:
        return sum((each.num_bytes.times(count) for each, count in self.rounds), Bytes())

    def after(self, ready_s: Seconds) -> Seconds:
        """Return the time at which each worker is done with all rounds.

        Args:
            ready_s: time at which each worker begins, [num_workers].
        """
        for each, count in self.rounds:
            ready_s = each.after(ready_s) if count == 1 else _many(each, count, ready_s)
        return ready_s


def _many(each: Round, count: int, ready_s: Seconds) -> Seconds:
    ranks = np.arange(len(ready_s))
    if not (np.array_equal(each.senders, ranks) and np.array_equal(each.receivers, (ranks + 1) % len(ranks))):
        for _ in range(count):
            ready_s = each.after(ready_s)
        return ready_s
    if np.ptp(each.busy_s) or np.ptp(each.arrival_s) or count < len(ready_s):
        return each.repeated(ready_s, count)
    return around_uniform_ring(ready_s, count, each.busy_s[0], each.arrival_s[0])


def around_uniform_ring(ready_s: Seconds, count: int, busy_s: float, arrival_s: float) -> Seconds:
    """Return what `count` rounds of a ring with equal links come to, in time that does not depend on `count`.

    A worker's end is the longest path to it: it waits for its own port in some rounds, and for the worker before it in
    the others. Those are j hops of `arrival_s` and count - j waits of `busy_s` from the worker j places before it. For
    each of them the largest j counts, as a hop takes longer than a wait.

    Args:
        ready_s: time at which each worker begins, [num_workers].
        count: rounds, at least the number of workers.
        busy_s: seconds that the sender is busy.
        arrival_s: seconds until the message has arrived, at least `busy_s`.
    """
    size, extra_s = len(ready_s), arrival_s - busy_s
    full, rest = divmod(count, size)
    # From the worker at distance d, the largest j is full * size + d if d <= rest, else one turn less.
    reached = np.concatenate([ready_s, ready_s]) - extra_s * np.arange(2 * size)
    ends = np.arange(size, 2 * size)
    most = _window_max(reached, rest + 1)[ends] + extra_s * (full * size)
    if rest + 1 < size:
        before = _window_max(reached, size - rest - 1)[ends - rest - 1] + extra_s * ((full - 1) * size)
        most = np.maximum(most, before)
    result: Seconds = most + extra_s * ends + count * busy_s
    return result


def _window_max(values: Seconds, width: int) -> Seconds:
    """Return the maximum of each value and the `width` - 1 before it; the first ones are those of what there is."""
    padded = np.full(-(-len(values) // width) * width, -np.inf)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, width)
    up_to = np.maximum.accumulate(blocks, axis=1).reshape(-1)
    from_here = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].reshape(-1)
    found = up_to.copy()
    found[width - 1 :] = np.maximum(found[width - 1 :], from_here[: len(found) - width + 1])
    return found[: len(values)]


def joined(exchanges: Iterable[Exchange]) -> Exchange:
    """Return exchanges that follow one another as one."""
    return Exchange([each for exchange in exchanges for each in exchange.rounds])

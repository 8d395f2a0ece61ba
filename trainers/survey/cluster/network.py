"""A network of two levels in virtual time: rounds of messages between workers, vectorised over the workers.

A message of n bytes takes alpha + n beta, as in `platform.sim.network`. Its sender's port is busy for n beta, and the
message occupies the receiver's port at the same time as it arrives. Workers of a node have near links; between nodes
there are far links. A node has one port to the other nodes, which its workers share, or one for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.comm.allreduce.costs import AlphaBeta

Seconds = NDArray[np.float64]
Ranks = NDArray[np.intp]
Placement = Literal["packed", "scattered", "random"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


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

    def link(self, *, is_far: bool) -> AlphaBeta:
        return (self.far or self.near) if is_far else self.near

    def rings(self, members: Ranks, num_bytes: float) -> Round:
        """Return a round in which every worker of a ring sends to the next, in several rings at the same time.

        Args:
            members: workers of each ring, in its order, [rings, places].
            num_bytes: bytes of each message.
        """
        return replace(self.round(members.ravel(), np.roll(members, -1, axis=1).ravel(), num_bytes), members=members)

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
    members: Ranks | None = None
    """Workers of each ring, if the messages go around in rings, [rings, places]."""

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
        """Return the time at which each worker is done with the round, done many times."""
        if self.members is None:
            for _ in range(times):
                ready_s = self.after(ready_s)
            return ready_s
        done_s = ready_s.copy()
        busy_s, arrival_s = (each.reshape(self.members.shape) for each in (self.busy_s, self.arrival_s))
        for ring, busy, arrival in zip(self.members, busy_s, arrival_s, strict=True):
            done_s[ring] = around_ring(ready_s[ring], times, busy, arrival)
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
            ready_s = each.after(ready_s) if count == 1 else each.repeated(ready_s, count)
        return ready_s


_MOST_KINDS = 2


def around_ring(ready_s: Seconds, count: int, busy_s: Seconds, arrival_s: Seconds) -> Seconds:
    """Return what `count` rounds come to in which every worker of a ring sends to the next.

    Args:
        ready_s: time at which each worker begins, [num_workers].
        count: number of rounds.
        busy_s: seconds for which each worker's port is busy with its message, [num_workers].
        arrival_s: seconds until each worker's message has arrived at the next, at least `busy_s`, [num_workers].
    """
    if count >= len(ready_s) and len(np.unique(busy_s)) <= _MOST_KINDS:
        return _longest_paths(ready_s, count, busy_s, arrival_s)
    done_s, arrives_s = ready_s.copy(), np.empty_like(ready_s)
    for _ in range(count):
        np.add(done_s, arrival_s, out=arrives_s)
        np.add(done_s, busy_s, out=done_s)
        np.maximum(done_s[1:], arrives_s[:-1], out=done_s[1:])
        done_s[0] = max(done_s[0], arrives_s[-1])
    return done_s


def _longest_paths(ready_s: Seconds, count: int, busy_s: Seconds, arrival_s: Seconds) -> Seconds:
    """Return what `around_ring` returns, in time that hardly depends on `count`.

    The end of worker i is the longest path to it. A path begins at a worker when that is ready. In each round it
    hops to the next worker, or waits for the port of the worker where it is. All its waits are at the busiest port that
    it passes. A path that goes all the way around passes the busiest of all.

    `count` is at least the number of workers, and `busy_s` has two values at most.
    """
    size = len(ready_s)
    places = np.arange(2 * size)  # two turns, so that no path passes the end of the array
    ends = places[size:]
    hops_s = np.concatenate([[0.0], np.cumsum(np.tile(arrival_s, 2))])[: 2 * size]
    turn_s, most_s, least_s = float(arrival_s.sum()), float(busy_s.max()), float(busy_s.min())
    begins_s = np.tile(ready_s, 2) - hops_s
    full, rest = divmod(count, size)
    busiest = _RangeMax(begins_s + places * most_s)
    last_busiest = np.maximum.accumulate(np.where(np.tile(busy_s, 2) == most_s, places, -1))[ends]
    done_s: Seconds = hops_s[ends] + (count - ends) * most_s + busiest.between(ends - size + 1, last_busiest)
    short = last_busiest < ends
    if short.any():  # paths that pass no busiest port
        near = _RangeMax(begins_s + places * least_s).between(last_busiest[short] + 1, ends[short])
        short_s = hops_s[ends[short]] + (count - ends[short]) * least_s + near
        done_s[short] = np.maximum(done_s[short], short_s)
    for turns, nearest, farthest in [
        (full, 0, rest),
        (full - 1, rest + 1, size - 1),
        (1, 0, size - 1 if full > 1 else rest),
    ]:
        if turns >= 1 and nearest <= farthest:
            from_start = busiest.between(ends - farthest, ends - nearest)
            around_s = hops_s[ends] + turns * turn_s + (count - turns * size - ends) * most_s + from_start
            done_s = np.maximum(done_s, around_s)
    return done_s


class _RangeMax:
    """The maximum of any range of an array, by a table of the maxima of ranges of 1, 2, 4, ... values."""

    def __init__(self, values: Seconds) -> None:
        self._table = [values]
        width = 1
        while 2 * width <= len(values):
            self._table.append(np.maximum(self._table[-1][:-width], self._table[-1][width:]))
            width *= 2

    def between(self, first: Ranks, last: Ranks) -> Seconds:
        """Return the maximum of values first to last, both included, of each range."""
        levels = np.frexp((last - first + 1).astype(np.float64))[1] - 1
        found = np.empty(len(first))
        for level in np.unique(levels):
            of_level = levels == level
            row = self._table[level]
            found[of_level] = np.maximum(row[first[of_level]], row[last[of_level] + 1 - (1 << level)])
        return found


def joined(exchanges: Iterable[Exchange]) -> Exchange:
    """Return exchanges that follow one another as one."""
    return Exchange([each for exchange in exchanges for each in exchange.rounds])

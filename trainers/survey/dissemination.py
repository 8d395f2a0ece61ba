"""Simulations, vectorised, of gossip and of corrected gossip, which guarantees delivery.

Push gossip: in each round every informed node sends to one other node, drawn at random. The survey (section 7.3) prints
that 1.639 log2 m rounds reach all m with high probability. Pittel, "On Spreading a Rumor" (1987), has log2 m + ln m,
which is 1.693 log2 m.

Correction on a ring: Hoefler, Barak, Shiloh and Drezner, "Corrected Gossip Algorithms for Fast Reliable Broadcast on
Unreliable Systems" (2017), checked (algorithm 2) and failure-proof (algorithm 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from orchestray.trainers.sync.local.mixing import expected_rounds

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """The results of push gossip from node 0, for each trial."""

    informed: Flags
    """Informed nodes after the rounds, [trials, nodes]."""
    rounds_to_all: Counts
    """First round after which all nodes were informed, [trials]; -1 if there was none."""

    @property
    def informed_fraction(self) -> float:
        return float(self.informed.mean())


def push_gossip(num_nodes: int, rounds: int, trials: int, draw: np.random.Generator) -> Spread:
    """Simulate push gossip from node 0 for a number of rounds.

    Args:
        num_nodes: m, at least 2.
        rounds: number of rounds; in each, every informed node sends to one other node.
        trials: number of independent trials.
        draw: generator of the targets.
    """
    informed, rounds_to_all = _start(num_nodes, trials), np.full(trials, -1)
    for number in range(1, rounds + 1):
        informed |= _random_targets(informed, draw)
        rounds_to_all[(rounds_to_all < 0) & informed.all(axis=1)] = number
    return Spread(informed, rounds_to_all)


@dataclass(frozen=True)
class Corrected:
    """The results of corrected gossip from node 0, for each trial."""

    after_gossip: Counts
    """Number of nodes alive at the end that were informed when the correction began, [trials]."""
    missed: Counts
    """Number of nodes alive at the end that are not informed, [trials]."""
    correction_steps: Counts
    """Number of steps until no node had anything left to send, [trials]; a step is one message to each side."""
    messages: Counts
    """Number of messages of gossip and correction together, [trials]."""


def corrected_gossip(
    num_nodes: int,
    rounds: int,
    trials: int,
    draw: np.random.Generator,
    *,
    num_failures: int = 0,
    tolerated_failures: int = 0,
) -> Corrected:
    """Gossip for a number of rounds, then correct on a ring.

    In the correction every node informed by gossip sends to its neighbours on both sides of the ring, nearest first. It
    stops on a side when it has received messages from `tolerated_failures` + 1 gossip-informed nodes there. Each of
    those informs all nodes in between. With 0 this is checked correction, which is reliable if no node fails while it
    runs. With f it is failure-proof: reliable if at most f nodes fail, at any time.

    Args:
        num_nodes: m, at least 2.
        rounds: number of rounds of gossip.
        trials: number of independent trials.
        draw: generator of the targets and of the failures.
        num_failures: number of nodes other than node 0 that fail permanently, each at a random time in gossip or
        correction.
        tolerated_failures: f.
    """
    fails_at = _failure_times(num_nodes, rounds, trials, num_failures, draw)
    informed, messages = _start(num_nodes, trials), np.zeros(trials, dtype=np.int64)
    for number in range(rounds):
        sending = informed & (fails_at > number)
        informed |= _random_targets(sending, draw) & (fails_at > number)
        messages += sending.sum(axis=1)
    lives = fails_at == np.inf
    after_gossip = (informed & lives).sum(axis=1)
    steps = _correct(informed, fails_at - rounds, messages, tolerated_failures + 1)
    return Corrected(after_gossip, (lives & ~informed).sum(axis=1), steps, messages)


@dataclass(frozen=True)
class Correction:
    """The reach of gossip and of a correction after it, in `TRIALS` trials."""

    nodes: int
    rounds: int
    failures: int
    """Number of nodes that fail in each trial, and that the correction tolerates."""
    by_gossip: float
    """Fraction of the nodes alive at the end that gossip informed."""
    whole: int
    """Number of trials in which gossip alone informed all of them."""
    missed: int
    """Number of nodes alive that were not informed in the end, in all trials together."""
    most_steps: int
    """Number of steps of the longest correction."""


def corrections(sizes: Sequence[int] = (8, 64, 1024), failures: Sequence[int] = (0, 5)) -> list[Correction]:
    """Return the results of corrected gossip for numbers of nodes and of failures.

    The rounds are those after which all nodes should be informed with high probability.
    """
    found = []
    for nodes, num_failures in product(sizes, failures):
        rounds, draw = math.ceil(expected_rounds(nodes)), np.random.default_rng(nodes + num_failures)
        spread = corrected_gossip(
            nodes, rounds, TRIALS, draw, num_failures=num_failures, tolerated_failures=num_failures
        )
        alive = nodes - num_failures
        found.append(
            Correction(
                nodes,
                rounds,
                num_failures,
                float(spread.after_gossip.mean()) / alive,
                int((spread.after_gossip == alive).sum()),
                int(spread.missed.sum()),
                int(spread.correction_steps.max()),
            )
        )
    return found


TRIALS = 1000


def _correct(informed: Flags, fails_at: NDArray[np.float64], messages: Counts, enough: int) -> Counts:
    """Send to nodes at increasing distances on the ring, on both sides, and return the steps of each trial.

    Changes `informed` and `messages`.
    """
    num_nodes = informed.shape[1]
    steps = np.zeros(len(informed), dtype=np.int64)
    heard = {side: np.zeros(informed.shape, dtype=np.int64) for side in (-1, 1)}
    """Number of gossip-informed nodes that each node has received from, on its left (-1) and on its right (1)."""
    sending = dict.fromkeys((-1, 1), np.nonzero(informed))
    """Trials and nodes of those that still send to their left, and to their right."""
    for distance in range(1, num_nodes):
        for side, (trials, nodes) in sending.items():
            goes_on = (heard[side][trials, nodes] < enough) & (fails_at[trials, nodes] >= distance)
            sending[side] = trials[goes_on], nodes[goes_on]
        for side, (trials, nodes) in sending.items():
            steps[trials] = distance
            np.add.at(messages, trials, 1)
            targets = (nodes + side * distance) % num_nodes
            takes = fails_at[trials, targets] >= distance
            informed[trials[takes], targets[takes]] = True
            heard[-side][trials[takes], targets[takes]] += 1  # a node receives at most one message per step and side
    return steps


def _start(num_nodes: int, trials: int) -> Flags:
    informed = np.zeros((trials, num_nodes), dtype=bool)
    informed[:, 0] = True
    return informed


def _random_targets(sending: Flags, draw: np.random.Generator) -> Flags:
    """Return the nodes that receive a message if every node of `sending` sends to one other node."""
    trials, senders = np.nonzero(sending)
    targets = draw.integers(sending.shape[1] - 1, size=len(senders))
    targets += targets >= senders
    receivers = np.zeros_like(sending)
    receivers[trials, targets] = True
    return receivers


def _failure_times(
    num_nodes: int, rounds: int, trials: int, num_failures: int, draw: np.random.Generator
) -> NDArray[np.float64]:
    """Return the times up to which the nodes work, [trials, nodes]; infinity: to the end.

    A time is a round, or `rounds` + the step of the correction. Half of the failures happen in the first steps of the
    correction, where they do most harm.
    """
    fails_at = np.full((trials, num_nodes), np.inf)
    if num_failures:
        keys = draw.random((trials, num_nodes - 1))
        who = np.argpartition(keys, num_failures - 1, axis=1)[:, :num_failures] + 1
        np.put_along_axis(fails_at, who, draw.integers(0, 2 * rounds, size=who.shape).astype(np.float64), axis=1)
    return fails_at

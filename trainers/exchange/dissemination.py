"""How a rumour spreads by gossip, and how a correction at the end makes sure of it: simulations, vectorised.

Push gossip: in each round everybody who knows tells one other, drawn at random. The survey (section 7.3) prints that
1.639 log2 m rounds reach all m with high probability; Pittel, "On Spreading a Rumor" (1987), has log2 m + ln m, which
is 1.693 log2 m. Correction on a ring: Hoefler, Barak, Shiloh and Drezner, "Corrected Gossip Algorithms for Fast
Reliable Broadcast on Unreliable Systems" (2017), checked (algorithm 2) and failure-proof (algorithm 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

ROUNDS_PER_LOG2 = 1.639


def expected_rounds(num_nodes: int) -> float:
    """1.639 log2 m, as the survey has it."""
    return ROUNDS_PER_LOG2 * math.log2(num_nodes)


@dataclass(frozen=True)
class Spread:
    """What push gossip from node 0 did, in each trial."""

    informed: Flags
    """[trials, nodes], after the rounds."""
    rounds_to_all: Counts
    """[trials]: the first round after which all knew; -1: it took more rounds than there were."""

    @property
    def informed_fraction(self) -> float:
        return float(self.informed.mean())


def push_gossip(num_nodes: int, rounds: int, trials: int, draw: np.random.Generator) -> Spread:
    """Spread a rumour of node 0 for a number of rounds.

    Args:
        num_nodes: m, at least 2.
        rounds: in each, every node that knew before it tells one other node.
        trials: independent ones.
        draw: of the targets.
    """
    informed, rounds_to_all = _start(num_nodes, trials), np.full(trials, -1)
    for number in range(1, rounds + 1):
        informed |= _told_at_random(informed, draw)
        rounds_to_all[(rounds_to_all < 0) & informed.all(axis=1)] = number
    return Spread(informed, rounds_to_all)


@dataclass(frozen=True)
class Corrected:
    """What corrected gossip from node 0 did, in each trial."""

    after_gossip: Counts
    """[trials]: nodes alive at the end that knew when the correction began."""
    missed: Counts
    """[trials]: nodes alive at the end that do not know."""
    correction_steps: Counts
    """[trials]: until nobody had anything left to send; in a step a node sends to one node on each side."""
    messages: Counts
    """[trials]: sent in gossip and correction together."""


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

    In the correction every node that gossip has reached tells its neighbours on the ring, first the nearest on either
    side, then the next, and goes on to a side until it has heard from that side from `tolerated_failures` + 1 nodes
    that gossip reached: each of those has told, or will tell, whoever lies between. With 0 that is checked correction,
    which is sure if nobody fails while it runs; with f it is failure-proof: sure if at most f fail, whenever that is.

    Args:
        num_nodes: m, at least 2.
        rounds: of gossip.
        trials: independent ones.
        draw: of targets, of who fails and of when.
        num_failures: nodes other than node 0 that stop for good, each at a moment of its own of gossip or correction.
        tolerated_failures: f.
    """
    dies_at = _moments_of_death(num_nodes, rounds, trials, num_failures, draw)
    informed, messages = _start(num_nodes, trials), np.zeros(trials, dtype=np.int64)
    for number in range(rounds):
        sending = informed & (dies_at > number)
        informed |= _told_at_random(sending, draw) & (dies_at > number)
        messages += sending.sum(axis=1)
    lives = dies_at == np.inf
    after_gossip = (informed & lives).sum(axis=1)
    steps = _correct(informed, dies_at - rounds, messages, tolerated_failures + 1)
    return Corrected(after_gossip, (lives & ~informed).sum(axis=1), steps, messages)


def _correct(informed: Flags, dies_at: NDArray[np.float64], messages: Counts, enough: int) -> Counts:
    """Tell by distance on the ring, both ways, changing `informed` and `messages`; returns the steps of each trial."""
    num_nodes = informed.shape[1]
    steps = np.zeros(len(informed), dtype=np.int64)
    heard = {side: np.zeros(informed.shape, dtype=np.int64) for side in (-1, 1)}
    """How many that gossip reached each node has heard from, on its left (-1) and on its right (1)."""
    sending = dict.fromkeys((-1, 1), np.nonzero(informed))
    """Who still tells others on its left, and on its right: trials, nodes."""
    for distance in range(1, num_nodes):
        for side, (trials, nodes) in sending.items():
            goes_on = (heard[side][trials, nodes] < enough) & (dies_at[trials, nodes] >= distance)
            sending[side] = trials[goes_on], nodes[goes_on]
        for side, (trials, nodes) in sending.items():
            steps[trials] = distance
            np.add.at(messages, trials, 1)
            targets = (nodes + side * distance) % num_nodes
            takes = dies_at[trials, targets] >= distance
            informed[trials[takes], targets[takes]] = True
            heard[-side][trials[takes], targets[takes]] += 1  # nobody is told twice in a step from one side
    return steps


def _start(num_nodes: int, trials: int) -> Flags:
    informed = np.zeros((trials, num_nodes), dtype=bool)
    informed[:, 0] = True
    return informed


def _told_at_random(sending: Flags, draw: np.random.Generator) -> Flags:
    """Who is told when everybody of `sending` tells one other node."""
    trials, senders = np.nonzero(sending)
    targets = draw.integers(sending.shape[1] - 1, size=len(senders))
    targets += targets >= senders
    told = np.zeros_like(sending)
    told[trials, targets] = True
    return told


def _moments_of_death(
    num_nodes: int, rounds: int, trials: int, num_failures: int, draw: np.random.Generator
) -> NDArray[np.float64]:
    """[trials, nodes]: the round, or `rounds` + the step of the correction, up to which a node works; inf: to the end.

    Half of the failures fall into the first steps of the correction, which is when they hurt.
    """
    dies_at = np.full((trials, num_nodes), np.inf)
    if num_failures:
        keys = draw.random((trials, num_nodes - 1))
        who = np.argpartition(keys, num_failures - 1, axis=1)[:, :num_failures] + 1
        np.put_along_axis(dies_at, who, draw.integers(0, 2 * rounds, size=who.shape).astype(np.float64), axis=1)
    return dies_at

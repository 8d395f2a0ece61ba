"""The partners of a step of gossip and their weights: pure arithmetic on small matrices.

A step is a matrix W [replicas, replicas]: x_i <- sum_j W[i, j] x_j, so j sends to i where W[i, j] > 0. Symmetric doubly
stochastic matrices keep the mean of the x and make it a fixed point: Metropolis-Hastings weights (Xiao, Boyd and Lall,
"A Scheme for Robust Distributed Sensor Fusion Based on Average Consensus", 2005, equation 5). Column-stochastic ones
keep only the sum; push-sum then divides by weights that were mixed in the same way (Kempe, Dobra and Gehrke,
"Gossip-Based Computation of Aggregate Information", 2003, protocol 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.errors import ConfigError

Matrix = NDArray[np.float64]
Adjacency = NDArray[np.bool_]
"""Matrix [receiver, sender], True where a message is sent; its diagonal is False."""
Graph = Literal["random", "ring", "complete"] | Mapping[str, Any]
Kind = Literal["symmetric", "push_sum"]

_WHERE = "strategy.exchange.graph"


class Mixer:
    """The mixing matrix of each step, the same on every caller.

    Args:
        size: number of replicas.
        graph: "random": each replica exchanges with `peers` others, drawn again in each step from seed and step.
            "ring", "complete" or {"edges": pairs of ranks}: always the same ones.
        peers: number of others on the random graph, limited to size - 1.
        kind: "symmetric": both of a pair send. "push_sum": on the random graph a replica receives from others than it
            sends to, on the ring it sends only to the next one; on other graphs it sends to all neighbours.
        seed: seed of the draws.

    Raises:
        ConfigError: an edge names a replica that does not exist, or the graph is not connected.
    """

    def __init__(self, size: int, graph: Graph = "random", peers: int = 1, kind: Kind = "symmetric", seed: int = 0):
        self.size = size
        self.name = graph if isinstance(graph, str) else "edges"
        self._peers = min(peers, size - 1)
        self._kind = kind
        self._seed = seed
        self._fixed: Matrix | None = None
        if size == 1:
            self._fixed = np.ones((1, 1))
        elif graph != "random":
            self._fixed = self._weigh(fixed_graph(size, graph, one_way=kind == "push_sum"))

    def matrix(self, step: int) -> Matrix:
        """Return the matrix of a step, counted from 1."""
        if self._fixed is not None:
            return self._fixed
        draw = np.random.default_rng([self._seed, step])
        pick = random_matchings if self._kind == "symmetric" else random_targets
        return self._weigh(pick(self.size, self._peers, draw))

    def _weigh(self, talks: Adjacency) -> Matrix:
        return metropolis_hastings(talks) if self._kind == "symmetric" else pushed(talks)


def fixed_graph(size: int, graph: Graph, *, one_way: bool = False) -> Adjacency:
    """Return a ring, a complete graph or one of given edges, checked; `one_way`:
    on a ring each sends only to the next.
    """
    talks = np.zeros((size, size), dtype=bool)
    ranks = np.arange(size)
    if graph == "complete":
        talks[:] = True
    elif graph == "ring":
        talks[(ranks + 1) % size, ranks] = True
        if not one_way:
            talks |= talks.T
    else:
        assert isinstance(graph, Mapping)
        for first, second in _checked(graph["edges"], size):
            talks[first, second] = talks[second, first] = True
        _check_connected(talks)
    talks[ranks, ranks] = False
    return talks


def _checked(edges: Any, size: int) -> Any:
    for first, second in edges:
        if max(first, second) >= size:
            text = f"the edge [{first}, {second}] names replica {max(first, second)}, and there are {size}, from 0"
            raise ConfigError(f"{_WHERE}.edges: {text}; give edges between them, or a larger strategy.network.data.")
        if first == second:
            raise ConfigError(f"{_WHERE}.edges: the edge [{first}, {second}] leads back to itself; take it out.")
    return edges


def _check_connected(talks: Adjacency) -> None:
    reached = np.linalg.matrix_power((talks | np.eye(len(talks), dtype=bool)).astype(float), len(talks))[0] > 0
    if not reached.all():
        inside, outside = int(np.flatnonzero(reached)[-1]), int(np.flatnonzero(~reached)[0])
        text = f"the graph is not connected: no path leads from replica {inside} to replica {outside}"
        raise ConfigError(
            f"{_WHERE}.edges: {text}, so they would never agree; add an edge such as [{inside}, {outside}]."
        )


def random_matchings(size: int, count: int, draw: np.random.Generator) -> Adjacency:
    """Return `count` random perfect matchings that share no pair; with an odd number of replicas one rests in each.

    The rounds of a tournament (the circle method) are such matchings: some rounds, the players in random order.
    """
    places = size + size % 2
    rounds = draw.choice(places - 1, count, replace=False)
    order = draw.permutation(size)
    talks = np.zeros((size, size), dtype=bool)
    circle = np.arange(places - 1)
    for number in rounds:
        opposite = (number - circle) % (places - 1)
        alone = circle == opposite
        first, second = circle, np.where(alone, places - 1, opposite)
        real = (first < size) & (second < size)
        talks[order[first[real]], order[second[real]]] = True
    return talks | talks.T


def random_targets(size: int, count: int, draw: np.random.Generator) -> Adjacency:
    """Draw `count` others for each replica to send to, so that each also receives from as many.

    Each sends by `count` offsets around a random circle. If each target were drawn alone, a replica without a sender
    would halve its weight, and so double its next step.
    """
    order = draw.permutation(size)
    talks = np.zeros((size, size), dtype=bool)
    for offset in draw.choice(np.arange(1, size), count, replace=False):
        talks[np.roll(order, -offset), order] = True
    return talks


def metropolis_hastings(talks: Adjacency) -> Matrix:
    """Return symmetric doubly stochastic weights: W[i, j] = 1 / (1 + the larger
    degree of i and j) for neighbours, and W[i, i] is the rest.
    """
    if talks.sum() == talks.size - len(talks):  # complete: exactly the mean, the same bits everywhere
        return np.full(talks.shape, 1.0 / len(talks))
    degrees = talks.sum(axis=1)
    weights: Matrix = talks / (1.0 + np.maximum.outer(degrees, degrees))
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def pushed(talks: Adjacency) -> Matrix:
    """Return column-stochastic weights: each keeps 1 / (1 + number it sends to) and sends as much to each of them."""
    shares = (talks | np.eye(len(talks), dtype=bool)).astype(np.float64)
    return np.asarray(shares / shares.sum(axis=0))


def contraction(matrices: Sequence[Matrix]) -> float:
    """Return the factor by which a step multiplies the disagreement at most, in the root mean square over the matrices.

    It is the root of the second eigenvalue of the mean of W^T W (Boyd, Ghosh, Prabhakar and Shah, "Randomized Gossip
    Algorithms", 2006, section II-B). For one symmetric W it is its second eigenvalue by absolute value (Xiao and Boyd,
    "Fast Linear Iterations for Distributed Averaging", 2004, equation 11).
    """
    away = np.concatenate(matrices) - 1.0 / matrices[0].shape[1]  # its W^T W is the sum of theirs less the mean's
    return float(np.linalg.norm(away, ord=2) / np.sqrt(len(matrices)))


def steps_to_reach_all(matrix_of: Callable[[int], Matrix], size: int, first_step: int = 1) -> int:
    """Return the number of steps from `first_step` on until what any replica knew has reached every other.

    Raises:
        ValueError: it has not within 64 x size steps.
    """
    known = np.eye(size, dtype=bool)
    """Knowledge, [replica, replica whose knowledge it has]."""
    for number in range(64 * size):
        if known.all():
            return number
        known = (matrix_of(first_step + number) > 0).astype(np.float32) @ known.astype(np.float32) > 0
    raise ValueError(f"after {64 * size} steps not every replica has heard of every other")


ROUNDS_PER_LOG2 = 1.639


def expected_rounds(num_nodes: int) -> float:
    """Return 1.639 log2 m, the survey's number of rounds until a rumour reaches all m nodes."""
    return ROUNDS_PER_LOG2 * math.log2(num_nodes)

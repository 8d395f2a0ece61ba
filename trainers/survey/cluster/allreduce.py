"""All-reduces as rounds on a network: those of `platform.comm.allreduce.schedules`, vectorised, and one of two levels.

Parts are equal: where the schedules differ by one element, the part here is a fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, is_power_of_two, num_levels
from orchestray.trainers.survey.cluster.network import Exchange, Network, Ranks, Round


def all_reduce(algorithm: str, network: Network, num_bytes: float) -> Exchange:
    """Return the rounds of an all-reduce among all workers.

    Args:
        algorithm: ring, butterfly, rabenseifner, tree, or hierarchical.
        network: the workers and their links.
        num_bytes: bytes of the tensor.

    Raises:
        ValueError: unknown algorithm, or a hierarchical one on nodes that differ in their numbers of workers.
    """
    if algorithm not in _ROUNDS:
        raise ValueError(f"There is no all-reduce {algorithm!r}; there are {', '.join(_ROUNDS)}.")
    if network.num_workers == 1:
        return Exchange([])
    return Exchange(_ROUNDS[algorithm](network, num_bytes))


def gathered(network: Network, num_bytes: float) -> Exchange:
    """Return the rounds of a step with parameters sharded over all workers (ZeRO stage 3, Rajbhandari et al. 2020).

    Parameters are gathered in a ring for the forward pass and again for the backward pass, and gradients are added up
    in their shards: half as many bytes again as a ring sends.

    Args:
        network: the workers and their links.
        num_bytes: bytes of the parameters.
    """
    return Exchange([(each, count // 2 * 3) for each, count in all_reduce("ring", network, num_bytes).rounds])


def hierarchical_s(network: Network, num_bytes: float) -> float:
    """Return the seconds of a hierarchical all-reduce: a ring within nodes, one between them, and again one within.

    With g workers a node, N nodes and n bytes: 2 (g - 1) (alpha + n/g beta) within, 2 (N - 1) (alpha + n/g/N beta)
    between; where the g workers of a node share its port, a message between nodes takes g times the beta.
    """
    num_nodes, group = network.num_nodes, network.num_workers // network.num_nodes
    far = network.link(is_far=True)
    shared = AlphaBeta(far.alpha_s, far.beta_s_per_byte * (group if network.shares_port else 1))
    within_s = cost_s("ring", group, num_bytes, network.near)
    return within_s + cost_s("ring", num_nodes, num_bytes / group, shared)


def _ring(network: Network, num_bytes: float) -> list[tuple[Round, int]]:
    size = network.num_workers
    return [(network.rings(np.arange(size)[None], num_bytes / size), 2 * (size - 1))]


def _butterfly(network: Network, num_bytes: float) -> list[tuple[Round, int]]:
    places, fold, unfold = _folded(network, num_bytes)
    numbers = np.arange(len(places))
    levels = [
        network.round(places, places[numbers ^ (1 << level)], num_bytes) for level in range(num_levels(len(places)))
    ]
    return [(each, 1) for each in [*fold, *levels, *unfold]]


def _rabenseifner(network: Network, num_bytes: float) -> list[tuple[Round, int]]:
    places, fold, unfold = _folded(network, num_bytes)
    numbers = np.arange(len(places))
    halving = [
        network.round(places, places[numbers ^ (1 << level)], num_bytes / (2 << level))
        for level in range(num_levels(len(places)))
    ]
    return [(each, 1) for each in [*fold, *halving, *reversed(halving), *unfold]]


def _folded(network: Network, num_bytes: float) -> tuple[Ranks, list[Round], list[Round]]:
    """Return the workers that take part in a schedule for a power of two, and the rounds before and after it."""
    size = network.num_workers
    ranks = np.arange(size)
    if is_power_of_two(size):
        return ranks, [], []
    num_folded = size - (1 << num_levels(size))
    even = ranks[: 2 * num_folded : 2]
    places = np.concatenate([even + 1, ranks[2 * num_folded :]])
    return places, [network.round(even, even + 1, num_bytes)], [network.round(even + 1, even, num_bytes)]


def _tree(network: Network, num_bytes: float) -> list[tuple[Round, int]]:
    size = network.num_workers
    ranks, up, down = np.arange(size), [], []
    for level in range((size - 1).bit_length()):
        senders = ranks[ranks % (2 << level) == 1 << level]
        up.append(network.round(senders, senders - (1 << level), num_bytes))
        down.append(network.round(senders - (1 << level), senders, num_bytes))
    return [(each, 1) for each in [*up, *reversed(down)]]


def _hierarchical(network: Network, num_bytes: float) -> list[tuple[Round, int]]:
    counts = np.bincount(network.nodes)
    if len(set(counts.tolist())) > 1:
        raise ValueError(
            f"a hierarchical all-reduce needs nodes with equal numbers of workers, got {network.num_workers} workers "
            f"on nodes of {network.workers_per_node}"
        )
    group, num_nodes = int(counts[0]), len(counts)
    members = np.argsort(network.nodes, kind="stable").reshape(num_nodes, group)
    rounds: list[tuple[Round, int]] = []
    within = (network.rings(members, num_bytes / group), group - 1)
    if group > 1:
        rounds.append(within)
    if num_nodes > 1:
        rounds.append((network.rings(members.T, num_bytes / group / num_nodes), 2 * (num_nodes - 1)))
    if group > 1:
        rounds.append(within)
    return rounds


_ROUNDS: Mapping[str, Callable[[Network, float], list[tuple[Round, int]]]] = MappingProxyType(
    {
        "ring": _ring,
        "butterfly": _butterfly,
        "rabenseifner": _rabenseifner,
        "tree": _tree,
        "hierarchical": _hierarchical,
    }
)
ALL_REDUCES: tuple[str, ...] = tuple(_ROUNDS)
"""Names of the all-reduces; the first four are those of `ALGORITHMS`."""
assert set(ALGORITHMS) < set(ALL_REDUCES)

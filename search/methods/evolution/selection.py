"""Selection of parents among the individuals that have been evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from orchestray.search.methods.evolution.variation import Individual


def tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """Return the best of `size` individuals drawn with replacement (Real et al., 2019, algorithm 1).

    With several scores, it is the drawn one with the best standing among all individuals. The individual of rank r
    among n (1 is the best) wins with probability ((n - r + 1)^size - (n - r)^size) / n^size.
    """
    drawn = rng.integers(len(individuals), size=size)
    return individuals[int(drawn[np.argmax(standings(individuals)[drawn])])]


def subset_tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """Return the best of `size` different individuals, or of all if there are fewer.

    With several scores, it is the one with the best standing among those drawn. The best of n wins with probability
    size / n.
    """
    drawn = rng.choice(len(individuals), size=min(size, len(individuals)), replace=False, shuffle=False)
    met: list[Individual] = [individuals[int(index)] for index in drawn]
    return met[int(np.argmax(standings(met)))]


def worst_of(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> int:
    """Return the index of the worst of `size` individuals drawn with replacement."""
    drawn = rng.integers(len(individuals), size=size)
    return int(drawn[np.argmin(standings(individuals)[drawn])])


def standings(individuals: Sequence[Individual]) -> np.ndarray:
    """Return numbers that are larger for better individuals: [n]; see `standings_of`."""
    violations = np.array([individual.violation for individual in individuals])
    return standings_of(np.array([one.scores or (one.score,) for one in individuals]), violations)


def standings_of(scores: np.ndarray, violations: np.ndarray | None = None) -> np.ndarray:
    """Return numbers that are larger for better rows of scores.

    One score is its own standing. With several, a better front counts first, and fewer near rows on the same front
    second (crowded comparison of NSGA-II: Deb et al., A Fast and Elitist Multiobjective Genetic Algorithm, 2002,
    section III.B). The standings of front r lie in [-r, -r + 1/2).

    Infeasible rows stand below all feasible ones, by their violations alone (Deb, An efficient constraint handling
    method for genetic algorithms, 2000, section 3). They reach as far down as the standings of the feasible ones do.

    Args:
        scores: [n, num_scores], to be maximised.
        violations: sum of the bounds that each row breaks, [n]; None: all are feasible.

    Returns:
        The standings, [n].
    """
    if violations is not None and violations.any():
        ordered = np.empty(len(scores))
        is_feasible = violations == 0
        floor, reach = 0.0, 1.0
        if is_feasible.any():
            ordered[is_feasible] = feasible = standings_of(scores[is_feasible])
            floor, reach = float(feasible.min()), float(np.ptp(feasible)) or 1.0
        kinds, places = np.unique(violations[~is_feasible], return_inverse=True)
        ordered[~is_feasible] = floor - reach * (1 + places) / len(kinds)
        return ordered
    if scores.shape[1] < 2:
        only: np.ndarray = scores[:, 0]
        return only
    ranks = pareto_ranks(scores)
    crowding = np.empty(len(scores))
    for rank in range(int(ranks.max()) + 1):
        crowding[ranks == rank] = crowding_distances(scores[ranks == rank])
    standing: np.ndarray = crowding / (1 + crowding) / 2 - ranks
    return standing


def pareto_ranks(scores: np.ndarray) -> np.ndarray:
    """Return the Pareto front of each row: [n], from scores [n, num_scores] to be maximised.

    A row dominates another if it is at least as good in every score and better in one. Front 0 has the rows that no
    other dominates, front 1 those that only rows of front 0 dominate, and so on.
    """
    mine, others = scores[:, None], scores[None]
    dominates: np.ndarray = np.all(mine >= others, axis=-1) & np.any(mine > others, axis=-1)
    ranks = np.full(len(scores), -1)
    front = 0
    while (left := ranks < 0).any():
        ranks[left & ~dominates[left].any(0)] = front
        front += 1
    return ranks


def crowding_distances(scores: np.ndarray) -> np.ndarray:
    """Return the distance between the neighbours on either side, relative to the range and summed over the scores.

    The paper selects survivors and always keeps the ends of a front. A parent should not always be an end: here the
    gap between an end and its only neighbour counts twice.

    Args:
        scores: scores of one front, [n, num_scores].

    Returns:
        The distances, [n].
    """
    distances = np.zeros(len(scores))
    for column in scores.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        gaps = np.diff(ordered)
        if gaps.sum() > 0:
            distances[order] += (np.append(gaps, gaps[-1]) + np.append(gaps[0], gaps)) / gaps.sum()
    return distances


def pair(num_individuals: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return two different indices, any two equally likely."""
    first = int(rng.integers(num_individuals))
    second = int(rng.integers(num_individuals - 1))
    return first, second + (second >= first)


def roulette(scores: Sequence[float], num: int, rng: np.random.Generator) -> list[int]:
    """Return indices drawn with replacement, in proportion to the score above the worst score.

    The worst is never drawn unless all scores are equal (Xie and Yuille, 2017, section 3.2.2).
    """
    above = np.asarray(scores, dtype=np.float64)
    above = above - above.min()
    total = above.sum()
    chances = above / total if total > 0 else np.full(len(above), 1.0 / len(above))
    return [int(index) for index in rng.choice(len(above), size=num, p=chances)]

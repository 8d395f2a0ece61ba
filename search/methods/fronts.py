"""Trials with several scores: which are on a front that no other dominates, and how much room each has on it."""

from __future__ import annotations

import numpy as np


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

"""Who is the parent of the next: selection among individuals that have been evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from orchestray.search.methods.evolution.variation import Individual


def tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """The best of `size` drawn with replacement (Real et al., 2019, algorithm 1); by several scores, the one of those
    drawn that stands best among all.

    The one of rank r among n (1 is the best) is the parent with probability ((n - r + 1)^size - (n - r)^size) / n^size.
    """
    drawn = rng.integers(len(individuals), size=size)
    return individuals[int(drawn[np.argmax(standings(individuals)[drawn])])]


def subset_tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """The best of `size` different ones, or of all where there are fewer; by several scores, the one that stands best
    among those drawn.

    The best of n is the parent with probability size / n.
    """
    drawn = rng.choice(len(individuals), size=min(size, len(individuals)), replace=False, shuffle=False)
    met: list[Individual] = [individuals[int(index)] for index in drawn]
    return met[int(np.argmax(standings(met)))]


def worst_of(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> int:
    """The index of the worst of `size` drawn with replacement."""
    drawn = rng.integers(len(individuals), size=size)
    return int(drawn[np.argmin(standings(individuals)[drawn])])


def standings(individuals: Sequence[Individual]) -> np.ndarray:
    """Numbers that are larger the better an individual is: [n]; see `standings_of`."""
    if len(individuals[0].scores) < 2:
        return np.array([individual.score for individual in individuals])
    return standings_of(np.array([individual.scores for individual in individuals]))


def standings_of(scores: np.ndarray) -> np.ndarray:
    """Numbers that are larger the better a row of scores [n, num_scores], to be maximised, is: [n].

    By one score, that score. By several: first who is on a better front, then, on the same one, who has fewer others
    near (the crowded comparison of NSGA-II: Deb et al., A Fast and Elitist Multiobjective Genetic Algorithm, 2002,
    section III.B); the numbers of those of front r lie in [-r, -r + 1/2).
    """
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
    """The front each is on, 0 for those that no other is at least as good as in everything and better in something; the
    next is what is so without these, and so on: [n], from scores [n, num_scores] to be maximised.
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
    """How far the neighbours on either side are apart, as a part of the range of a front, summed over the scores: [n],
    from scores of one front, [n, num_scores].

    The paper, which chooses who survives, keeps the ends of a front whatever is near them. A parent should not always
    be an end: here the gap to the one neighbour that an end has counts twice.
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
    """Two different indices, any two equally likely."""
    first = int(rng.integers(num_individuals))
    second = int(rng.integers(num_individuals - 1))
    return first, second + (second >= first)


def roulette(scores: Sequence[float], num: int, rng: np.random.Generator) -> list[int]:
    """Indices drawn with replacement, each with a probability that grows with what its score is above the worst's
    (Xie and Yuille, 2017, section 3.2.2): the worst is never drawn unless all are alike.
    """
    above = np.asarray(scores, dtype=np.float64)
    above = above - above.min()
    total = above.sum()
    chances = above / total if total > 0 else np.full(len(above), 1.0 / len(above))
    return [int(index) for index in rng.choice(len(above), size=num, p=chances)]

"""Selection of parents among the individuals that have been evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from orchestray.search.methods.fronts import standings_of

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

"""Who is the parent of the next: selection among individuals that have been evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from orchestray.search.methods.evolution.variation import Individual


def tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """The best of `size` drawn with replacement (Real et al., 2019, algorithm 1).

    The one of rank r among n (1 is the best) is the parent with probability ((n - r + 1)^size - (n - r)^size) / n^size.
    """
    drawn = rng.integers(len(individuals), size=size)
    return individuals[max(drawn.tolist(), key=lambda index: individuals[index].score)]


def subset_tournament(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> Individual:
    """The best of `size` different ones, or of all where there are fewer.

    The best of n is the parent with probability size / n.
    """
    drawn = rng.choice(len(individuals), size=min(size, len(individuals)), replace=False, shuffle=False)
    return individuals[max(drawn.tolist(), key=lambda index: individuals[index].score)]


def worst_of(individuals: Sequence[Individual], size: int, rng: np.random.Generator) -> int:
    """The index of the worst of `size` drawn with replacement."""
    drawn = rng.integers(len(individuals), size=size)
    return int(min(drawn.tolist(), key=lambda index: individuals[index].score))


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

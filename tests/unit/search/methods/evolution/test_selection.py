"""Selection puts the pressure on that theory says."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.search.methods.evolution.selection import pair, roulette, subset_tournament, tournament
from orchestray.search.methods.evolution.variation import Candidate, Individual

NUM_DRAWS = 20_000


def individuals(num: int) -> list[Individual]:
    """Return individuals in an order of their own, with scores 0 to num - 1."""
    scores = np.random.default_rng(7).permutation(num)
    return [Individual(trial, float(score), Candidate()) for trial, score in enumerate(scores)]


def assert_chances(counts: np.ndarray, chances: np.ndarray) -> None:
    """Check that each count is within 4.5 standard deviations of a binomial's mean."""
    total = counts.sum()
    deviations = np.abs(counts - total * chances) / np.sqrt(np.maximum(total * chances * (1 - chances), 1e-12) + 1e-9)
    assert deviations.max() < 4.5, deviations


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_a_rank_wins_a_tournament_with_the_probability_of_theory(size: int) -> None:
    num, rng = 10, np.random.default_rng(size)
    population = individuals(num)
    counts = np.zeros(num)
    for _ in range(NUM_DRAWS):
        counts[num - 1 - int(tournament(population, size, rng).score)] += 1
    ranks = np.arange(1, num + 1)
    assert_chances(counts, ((num - ranks + 1.0) ** size - (num - ranks) ** size) / num**size)


def test_the_best_wins_a_tournament_without_replacement_as_often_as_it_is_drawn() -> None:
    num, size, rng = 20, 3, np.random.default_rng(0)
    population = individuals(num)
    wins = sum(subset_tournament(population, size, rng).score == num - 1 for _ in range(NUM_DRAWS))
    assert_chances(np.array([wins, NUM_DRAWS - wins], dtype=float), np.array([size / num, 1 - size / num]))


def test_the_wheel_turns_up_each_in_proportion_to_what_it_is_above_the_worst() -> None:
    scores = [1.0, 2.0, 4.0, 1.5]
    drawn = roulette(scores, NUM_DRAWS, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=4).astype(float)
    assert counts[0] == 0
    assert_chances(counts, np.array([0.0, 1.0, 3.0, 0.5]) / 4.5)


def test_a_wheel_of_equals_favours_none() -> None:
    counts = np.bincount(roulette([0.5] * 4, NUM_DRAWS, np.random.default_rng(1)), minlength=4).astype(float)
    assert_chances(counts, np.full(4, 0.25))


def test_a_pair_is_of_two_and_every_pair_is_as_likely() -> None:
    rng = np.random.default_rng(3)
    counts = np.zeros((5, 5))
    for _ in range(NUM_DRAWS):
        counts[pair(5, rng)] += 1
    assert np.trace(counts) == 0
    assert_chances(counts[~np.eye(5, dtype=bool)], np.full(20, 1 / 20))

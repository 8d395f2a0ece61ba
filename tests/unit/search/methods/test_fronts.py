"""Fronts of several scores, and the room on them."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.search.methods.fronts import crowding_distances, pareto_ranks


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all(a >= b) and np.any(a > b))


@pytest.mark.parametrize("num_scores", [2, 3])
def test_each_but_of_the_first_front_is_dominated_from_the_front_before_and_none_from_its_own(num_scores: int) -> None:
    scores = np.random.default_rng(0).integers(6, size=(60, num_scores)).astype(float)
    ranks = pareto_ranks(scores)
    assert set(ranks) == set(range(ranks.max() + 1))
    for row, rank in zip(scores, ranks, strict=True):
        by = {int(other) for at, other in zip(scores, ranks, strict=True) if dominates(at, row)}
        assert rank not in by
        assert rank == 0 or max(by) == rank - 1


def test_crowding_is_the_sum_of_the_gaps_on_both_sides_and_of_an_end_twice_its_one() -> None:
    front = np.array([[0.0, 10.0], [4.0, 0.0], [1.0, 7.0], [2.0, 6.0]])
    expected = [2 / 4 + 6 / 10, 4 / 4 + 12 / 10, 2 / 4 + 4 / 10, 3 / 4 + 7 / 10]
    assert crowding_distances(front) == pytest.approx(expected)
    assert crowding_distances(np.ones((1, 2))).tolist() == [0]
    assert crowding_distances(np.ones((3, 2))).tolist() == [0, 0, 0]

"""The record of ended trials: how trials with several scores stand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestray.search.methods.fronts import pareto_ranks
from orchestray.search.methods.hyper.encoding import Encoded
from orchestray.search.methods.hyper.history import History

POINT = Encoded(np.empty((1, 0)), np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.int64))


def recorded(rows: list[tuple[float, ...]], violations: list[tuple[float, ...]] | None = None) -> History:
    history = History(0, 0)
    for number, row in enumerate(rows):
        history.add(POINT, None, row, violations[number] if violations else ())
    return history


def test_a_trial_of_the_front_stands_above_all_others_and_one_that_dominates_above_the_dominated() -> None:
    rows = [tuple(row) for row in np.random.default_rng(0).integers(8, size=(80, 2)).astype(float).tolist()]
    standing, scores = recorded(rows).scores(), np.array(rows)
    ranks = pareto_ranks(scores)
    # Of equal trials of the front only the first is on it; the others are as near to it as can be.
    assert standing[ranks == 0].min() >= 0 > standing[ranks > 1].max()
    for one in range(len(rows)):
        worse = np.all(scores <= scores[one], axis=1) & np.any(scores < scores[one], axis=1)
        assert standing[worse].max(initial=-math.inf) <= standing[one]


def test_failed_trials_have_the_worst_of_each_score_and_infeasible_ones_are_not_on_the_front() -> None:
    history = recorded([(1.0, 2.0), (), (3.0, 0.0), (9.0, 9.0)], [(-1.0,), (), (-1.0,), (0.5,)])
    assert history.objectives().tolist() == [[1, 2], [1, 0], [3, 0], [9, 9]]
    assert history.best_first().tolist()[2:] == [3, 1]


@pytest.mark.parametrize("rows", [[(), ()], [(1.0,), (), (math.inf,)], [(1.0, 2.0), (3.0,)]])
def test_scores_are_finite_whatever_is_missing(rows: list[tuple[float, ...]]) -> None:
    assert np.isfinite(recorded(rows).scores()).all()


def test_trials_that_were_not_trained_for_their_bounds_are_not_judged_and_failed_ones_are() -> None:
    history = recorded([(1.0,), (), (), (2.0,)], [(-1.0,), (0.5,), (), (0.5,)])
    assert history.judged().tolist() == [0, 2, 3]
    assert history.best_first().tolist() == [0, 3, 1, 2]

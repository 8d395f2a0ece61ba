"""Averaged SGD comes as near the least loss as its rate says, and workers that do not wait come there sooner."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from orchestray.trainers.survey.convergence.logistic import Logistic, drawn, log_log_slope
from orchestray.trainers.survey.convergence.rates import Trained, doublings, staleness_bound, train

LEARNING_RATE, STEPS = 2.0, 1024
WORKERS = (1, 2, 4, 8)


@cache
def problem() -> Logistic:
    return drawn(400, 20, 4, np.random.default_rng(0))


@cache
def trained(num_workers: int) -> Trained:
    return train(problem(), num_workers, [num_workers * STEPS], LEARNING_RATE, seed=num_workers)


def test_sgd_convergence_rate_is_at_least_one_over_the_root_of_the_steps() -> None:
    sizes = doublings(128, 8192)
    found = train(problem(), 1, sizes.tolist(), LEARNING_RATE)
    fit = log_log_slope(sizes, found.errors)
    assert fit.slope <= -0.5 + 2 * fit.error
    assert fit.error < 0.05
    assert (found.errors > 0).all()
    assert found.most_stale == 0


def test_asynchronous_sgd_convergence_rate_is_at_least_one_over_the_root_of_workers_times_steps() -> None:
    errors = np.stack([trained(m).errors[:, -1] for m in WORKERS], axis=1)
    fit = log_log_slope(np.asarray(WORKERS), errors)
    assert fit.slope <= -0.5 + 2 * fit.error
    # In the same time, m workers come as near as one does in m times the steps: the speed-up is linear.
    alone = train(problem(), 1, [m * STEPS for m in WORKERS], LEARNING_RATE).errors.mean(axis=0)
    assert errors.mean(axis=0) == pytest.approx(alone, rel=0.25)
    for m in WORKERS:
        assert trained(m).seconds[0] == pytest.approx(STEPS, rel=0.02)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_gradients_are_stale_and_not_more_than_the_durations_allow(num_workers: int) -> None:
    assert num_workers - 1 <= trained(num_workers).most_stale <= staleness_bound(num_workers)


def test_the_least_loss_has_no_gradient_and_nothing_lies_below_it() -> None:
    some = problem()
    draw = np.random.default_rng(1)
    w = draw.standard_normal((200, some.num_features)) * 3
    assert (some.loss(w) > some.least_loss).all()
    assert some.least_loss < some.loss(np.zeros(some.num_features)) - 0.05
    products = (some.values * w[0][some.columns]).sum(axis=1)
    gradient = some.matrix.T @ some.slopes(np.arange(len(some.labels)), products) / len(some.labels)
    step = 1e-6
    numeric = [(some.loss(w[0] + step * axis) - some.loss(w[0] - step * axis)) / (2 * step) for axis in np.eye(20)]
    assert gradient == pytest.approx(numeric, abs=1e-7)


def test_a_slope_is_that_of_the_power() -> None:
    sizes = np.asarray([1.0, 4.0, 16.0])
    fit = log_log_slope(sizes, np.stack([3 * sizes**-0.5, 7 * sizes**-0.5]))
    assert (fit.slope, fit.error) == (pytest.approx(-0.5), pytest.approx(0.0, abs=1e-12))

"""Failures in virtual time cost what the closed form says, and Young's interval is the best one."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.survey.cluster.failures import (
    Failures,
    best_interval_s,
    going_on_goodput,
    restarting,
    restarting_goodput,
    young_daly_s,
)

DAY_S = 86_400.0
FAILURES = Failures(rate_per_s=1 / (365 * DAY_S), checkpoint_s=30.0, restart_s=300.0)


@pytest.mark.parametrize("num_workers", [100, 1000, 10_000])
@pytest.mark.parametrize("interval_s", [60.0, 600.0, 3600.0])
def test_simulated_goodput_is_that_of_the_closed_form(num_workers: int, interval_s: float) -> None:
    found = restarting(np.full(100_000, interval_s), num_workers, FAILURES, np.random.default_rng(0))
    assert found.goodput == pytest.approx(restarting_goodput(interval_s, num_workers, FAILURES), rel=0.01)
    expected = found.total_s * num_workers * FAILURES.rate_per_s
    assert abs(found.num_failures - expected) < 4 * expected**0.5  # as often as a Poisson process


@pytest.mark.parametrize("num_workers", [100, 1000, 5000])
def test_the_best_interval_of_the_simulation_is_young_and_daly_s(num_workers: int) -> None:
    expected_s = young_daly_s(num_workers, FAILURES)
    assert best_interval_s(num_workers, FAILURES) == pytest.approx(expected_s, rel=0.1)
    intervals_s = expected_s * np.geomspace(0.25, 4, 17)
    work_s = 4000 * intervals_s[-1]

    def goodput(interval_s: float) -> float:
        draw = np.random.default_rng(1)
        return restarting(np.full(int(work_s / interval_s), interval_s), num_workers, FAILURES, draw).goodput

    found = [goodput(interval_s) for interval_s in intervals_s]
    assert 0.6 < intervals_s[int(np.argmax(found))] / expected_s < 1.7  # the optimum is flat
    assert goodput(expected_s) > max(found) - 0.003
    assert goodput(expected_s / 4) < max(found) - 0.003
    assert goodput(4 * expected_s) < max(found) - 0.003


def test_the_best_interval_has_the_most_goodput_of_the_closed_form() -> None:
    for failures in (FAILURES, Failures(1e-4, 100.0, 0.0), Failures(1e-3, 1.0, 5000.0)):
        best_s = best_interval_s(10, failures)
        most = restarting_goodput(best_s, 10, failures)
        assert most > restarting_goodput(best_s * 1.05, 10, failures)
        assert most > restarting_goodput(best_s * 0.95, 10, failures)


def test_without_failures_only_saving_costs_and_it_is_never_worth_it() -> None:
    none = Failures(0.0, checkpoint_s=10.0)
    found = restarting(np.full(3, 90.0), 10_000, none, np.random.default_rng(0))
    assert (found.goodput, found.num_failures, found.total_s) == (0.9, 0, 300.0)
    assert restarting_goodput(90.0, 10_000, none) == 0.9
    assert young_daly_s(10, none) == best_interval_s(10, none) == float("inf")


def test_workers_that_go_on_lose_the_share_of_those_that_restart_and_what_they_wait_for_them() -> None:
    often = Failures(rate_per_s=1e-4, restart_s=100.0)
    assert going_on_goodput(1.0, 500, often, None) == pytest.approx(1 / 1.01)
    assert going_on_goodput(1.0, 500, often, 100) == going_on_goodput(1.0, 500, often, None)
    assert going_on_goodput(1.0, 500, often, 80) == pytest.approx(1 / 1.01 / 2)  # 500 workers, 0.05 a second, 20 s each


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        Failures(-1.0)

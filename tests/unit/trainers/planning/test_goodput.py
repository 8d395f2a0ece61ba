"""Young's interval is the best one where failures are seldom, and goodput is that of simulated failures."""

from __future__ import annotations

import random

import pytest

from orchestray.trainers.planning.goodput import best_interval_s, goodput


def test_no_other_interval_has_a_better_goodput_where_failures_are_seldom() -> None:
    best_s = best_interval_s(1.0, 10_000.0)
    reached = goodput(best_s, 1.0, 5.0, 10_000.0)
    others = [goodput(best_s * factor, 1.0, 5.0, 10_000.0) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert reached >= max(others)


@pytest.mark.parametrize(("interval_s", "checkpoint_s", "restart_s"), [(100.0, 5.0, 20.0), (30.0, 1.0, 0.0)])
def test_goodput_is_that_of_simulated_failures(interval_s: float, checkpoint_s: float, restart_s: float) -> None:
    mean_s, dice = 300.0, random.Random(0)
    segments, spent_s = 20_000, 0.0
    for _ in range(segments):
        while (failure_s := dice.expovariate(1 / mean_s)) < interval_s + checkpoint_s:
            spent_s += failure_s + restart_s
        spent_s += interval_s + checkpoint_s
    assert goodput(interval_s, checkpoint_s, restart_s, mean_s) == pytest.approx(
        segments * interval_s / spent_s, rel=0.01
    )


def test_failures_that_leave_no_time_leave_no_goodput() -> None:
    assert goodput(1e6, 1.0, 1.0, 1.0) == 0.0

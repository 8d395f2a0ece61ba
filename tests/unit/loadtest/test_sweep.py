"""Sweeps of rates, of servers whose capacity is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import Measured
from orchestray.loadtest.sweep import SHARES, sustained, sweep
from support.loadtest import measured_at

PLAN = Plan(Target("h", 1, "/"), OpenLoop(1.0), duration_s=1.0, warm_up_s=0.0)
OFFERED = [pytest.approx(share * 1000, rel=0.05) for share in SHARES]


def test_a_sweep_begins_with_what_clients_reach_and_ends_when_the_server_does_not_keep_up() -> None:
    saturated, *points = sweep(PLAN, lambda plan: measured_at(plan, 1000.0))
    assert isinstance(saturated.plan.load, ClosedLoop)
    assert [point.offered_per_s for point in points] == OFFERED
    assert sustained(points) is points[-2]
    _, *worse = sweep(PLAN, lambda plan: measured_at(plan, 1000.0 if isinstance(plan.load, ClosedLoop) else 400.0))
    assert [point.offered_per_s for point in worse] == OFFERED[:3]


def test_rates_that_are_named_are_all_measured_in_order() -> None:
    points = list(sweep(PLAN, lambda plan: measured_at(plan, 100.0), [400, 50, 300, 90]))
    assert [point.offered_per_s for point in points] == [50, 90, 300, 400]
    best = sustained(points)
    assert best is not None
    assert best.offered_per_s == 90


@pytest.mark.parametrize("number", [0, 2])
def test_a_sweep_ends_with_the_load_that_is_interrupted(number: int) -> None:
    loads: list[str] = []

    def measure(plan: Plan) -> Measured:
        loads.append(str(plan.load))
        return replace(measured_at(plan, 1000.0), is_interrupted=len(loads) == number + 1)

    assert len(list(sweep(PLAN, measure))) == number + 1

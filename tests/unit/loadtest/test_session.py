"""The output of a measurement on the terminal, of servers whose capacity is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestray.loadtest.loads import OpenLoop
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import Measured
from orchestray.loadtest.session import Session
from support.loadtest import measured_at

PLAN = Plan(Target("h", 1, "/"), OpenLoop(100.0), duration_s=1.0, warm_up_s=0.0)


def ending_with(number: int) -> Callable[..., Measured]:
    """Return a measurement that Ctrl-C ends at the load of this number, before anything of it was measured."""
    seen: list[Plan] = []

    def measure(plan: Plan, **_: object) -> Measured:
        seen.append(plan)
        if len(seen) > number:
            raise KeyboardInterrupt
        return measured_at(plan, 1000.0)

    return measure


def test_a_sweep_whose_load_has_measured_nothing_keeps_those_before() -> None:
    here = Session(PLAN, ending_with(2), quiet=True)
    assert [point["load"] for point in here.sweep([100, 200, 300])["points"]] == ["100 requests/s", "200 requests/s"]
    assert here.is_interrupted
    with pytest.raises(KeyboardInterrupt):
        Session(PLAN, ending_with(0), quiet=True).sweep([100, 200])


def test_table_and_picture_of_a_sweep_are_of_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    here = Session(PLAN, ending_with(9), quiet=True)
    told = here.sweep([100, 500])
    assert [point["latency_ms"]["p50"] for point in told["points"]] == [pytest.approx(10.0)] * 2
    assert (told["saturated"], told["sustained_per_s"], here.is_interrupted) == (None, 500, False)
    assert here.picture().count("<circle") == 4
    printed = capsys.readouterr()
    assert [line.split()[:4] for line in printed.out.splitlines()[2:4]] == [
        ["100/s", "99/s", "10", "10"],
        ["500/s", "495/s", "10", "10"],
    ]
    assert "It kept up with 500 requests/s." in printed.out
    assert printed.err == ""


def test_the_picture_of_one_load_is_of_its_seconds() -> None:
    here = Session(PLAN, ending_with(9), quiet=True)
    told = here.single()
    assert [(one["second"], one["num_ok"], one["num_failed"]) for one in told["seconds"]] == [(0, 100, 0)]
    assert here.picture().count("<circle") == 2

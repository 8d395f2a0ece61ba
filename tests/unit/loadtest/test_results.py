"""The load generator says when it was itself the limit, and only then."""

from __future__ import annotations

import pytest

from orchestray.loadtest.loads import ClosedLoop, Load, OpenLoop
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import Measured
from orchestray.loadtest.tally import Tally


def measured(load: Load, lags_ms: list[float], services_ms: list[float], cpu_share: float = 0.1) -> Measured:
    """Return the measurement of requests with these lags before they were sent, and these times until the answer."""
    tally = Tally(0.0, 10.0)
    for index, (lag_ms, service_ms) in enumerate(zip(lags_ms, services_ms, strict=True)):
        due_s = 9.0 * index / len(lags_ms)
        tally.record(due_s, due_s + lag_ms / 1e3, due_s + (lag_ms + service_ms) / 1e3, 200)
    return Measured(Plan(Target("127.0.0.1", 80, "/"), load), tally, (cpu_share,))


OPEN = OpenLoop(100.0)
PROMPT = [0.05] * 100


@pytest.mark.parametrize(
    ("lags_ms", "services_ms", "limited"),
    [
        (PROMPT, [5.0] * 100, False),
        ([0.05] * 98 + [3.0] * 2, [5.0] * 98 + [50.0] * 2, False),  # a pause of the machine: the server had it, too
        ([0.05] * 98 + [3.0] * 2, [5.0] * 100, True),  # 3 of the 8 ms of p99 are its own
        ([1.0] * 100, [5.0] * 100, True),  # a sixth of the mean
        ([0.1] * 100, [0.5] * 100, False),  # next to nothing
    ],
)
def test_it_was_the_limit_where_more_than_a_tenth_of_what_is_shown_is_its_own_delay(
    lags_ms: list[float], services_ms: list[float], limited: bool
) -> None:
    assert measured(OPEN, lags_ms, services_ms).limited is limited


def test_clients_that_wait_are_never_late_and_limited_where_it_has_no_time_left() -> None:
    assert not measured(ClosedLoop(8), PROMPT, [1.0] * 100, cpu_share=0.8).limited
    assert measured(ClosedLoop(8), PROMPT, [1.0] * 100, cpu_share=0.95).limited
    assert not measured(OPEN, PROMPT, [1.0] * 100, cpu_share=0.95).limited  # it sent all in time


def test_where_nothing_was_answered_nothing_is_said_of_it() -> None:
    assert not Measured(Plan(Target("127.0.0.1", 80, "/"), OPEN), Tally(0.0, 1.0), ()).limited

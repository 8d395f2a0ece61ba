"""Digits that are read at a pace."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.paced_digits import Pace, PacedDigits


class Clock:
    """A clock that goes on when somebody sleeps."""

    now_s = 5.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_pace_holds_its_rate_and_makes_up_for_no_pause() -> None:
    clock = Clock()
    pace = Pace(100.0, lambda: clock.now_s, clock.sleep)
    passed_s = []
    for pause_s in (0.0, 0.0, 7.0, 0.05, 0.0):
        clock.sleep(pause_s)
        pace.wait(10)
        passed_s.append(clock.now_s)
    assert passed_s == pytest.approx([5.1, 5.2, 12.3, 12.45, 12.55])


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_that_lets_nothing_pass_is_refused(rate: float) -> None:
    with pytest.raises(TaskError, match="must be above 0"):
        PacedDigits(rate)

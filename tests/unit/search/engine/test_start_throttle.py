"""Number of processes of trials that start at once."""

from __future__ import annotations

import math

import pytest

from orchestray.search.engine.start_throttle import StartThrottle


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fill(crowd: StartThrottle, clock: Clock) -> int:
    """Begin as many trials as there is room for; return their number."""
    num = 0
    while crowd.has_room():
        crowd.began(f"{clock.now_s}-{num}")
        num += 1
    return num


@pytest.mark.parametrize(("parallel", "cores", "begun"), [(2, 8.0, 2), (8, 2.0, 2), (4, 0.5, 1), (5, math.inf, 5)])
def test_at_first_there_is_a_process_for_each_core_and_no_more_than_asked_for(
    parallel: int, cores: float, begun: int
) -> None:
    assert fill(StartThrottle(parallel, cores, Clock()), Clock()) == begun


def test_trials_that_last_longer_than_a_start_get_one_further_process_after_the_other_up_to_all() -> None:
    clock = Clock()
    crowd = StartThrottle(4, 2.0, clock)
    assert fill(crowd, clock) == 2
    clock.now_s = 3.0
    crowd.answered()
    assert fill(crowd, clock) == 0, "the oldest may have waited for its process for as long"
    begun = []
    for clock.now_s in (6.5, 7.0, 10.0, 10.5, 20.0):
        begun.append(fill(crowd, clock))
    assert begun == [1, 0, 1, 0, 0]


def test_trials_that_are_over_sooner_than_a_process_would_be_there_get_none() -> None:
    clock = Clock()
    crowd = StartThrottle(4, 2.0, clock)
    crowd.began("a")
    crowd.began("b")
    clock.now_s = 2.0
    crowd.answered()
    for number in range(200):
        clock.now_s += 0.02
        crowd.left("ab"[number % 2])
        crowd.began("ab"[number % 2])
        assert not crowd.has_room()

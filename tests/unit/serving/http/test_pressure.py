"""Requests that come faster than they can be read, on a loop whose clock is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchestray.serving.http.pressure import Pressure


class Rounds(asyncio.SelectorEventLoop):
    """A loop that is told how long each of its rounds takes, and counts its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], Any]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self.timers.append((self.now_s + delay, callback))

    def round(self, seconds: float, pressure: Pressure, requests: int = 10) -> list[float]:
        """Timers that are due, then requests read a round ago, which together take so long."""
        due = [callback for at_s, callback in self.timers if at_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        for callback in due:
            callback()
        told = []
        for _ in range(requests):
            told.append(pressure.waited_s(self))
            self.now_s += seconds / requests
        if not requests:
            self.now_s += seconds
        return told


@pytest.fixture
def loop() -> Any:
    made = Rounds()
    yield made
    made.close()


def test_requests_wait_about_a_round_of_an_overloaded_loop(loop: Rounds) -> None:
    pressure = Pressure()
    told = [loop.round(0.2, pressure) for _ in range(12)][-1]
    # What is handled first was read in the round before, on average half a round ago; what comes last waits one more.
    assert 0.05 < told[0] < 0.2
    assert 0.2 < told[-1] < 0.4
    assert told == sorted(told)


def test_short_rounds_are_no_overload(loop: Rounds) -> None:
    pressure = Pressure()
    assert not any(any(loop.round(0.004, pressure)) for _ in range(1000))


def test_one_long_callback_is_no_overload(loop: Rounds) -> None:
    pressure = Pressure()
    for _ in range(20):
        loop.round(0.004, pressure)
    loop.round(3.0, pressure, requests=0)
    assert not any(any(loop.round(0.004, pressure)) for _ in range(20))


def test_an_overload_ends_with_the_first_round_that_is_short(loop: Rounds) -> None:
    pressure = Pressure()
    for _ in range(12):
        loop.round(0.2, pressure)
    for _ in range(6):
        loop.round(0.004, pressure)
    assert not any(loop.round(0.004, pressure))


def test_nothing_ticks_while_nobody_asks(loop: Rounds) -> None:
    pressure = Pressure()
    for _ in range(20):
        loop.round(0.004, pressure)
    for _ in range(1000):
        loop.round(0.005, pressure, requests=0)
    assert not loop.timers
    loop.round(0.004, pressure)
    assert len(loop.timers) == 1

"""Requests that come faster than they can be worked on, on a loop whose clock is moved by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from orchestray.serving.http.overload.pressure import OverloadDetector

ANSWER_S, REFUSAL_S = 0.0003, 0.00003


class Rounds(asyncio.SelectorEventLoop):
    """A loop that works in rounds: first what was called soon, then what has come is read."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.refusal_s = REFUSAL_S
        self.soon: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self.soon.append((callback, args))

    def round(self, pressure: OverloadDetector, num_requests: int, allowed_s: float, *, pause_s: float = 0.0) -> int:
        """Do what was taken on, and read requests; return how many of them are taken on."""
        self.do_all(pause_s)
        return self.read(pressure, num_requests, allowed_s)

    def do_all(self, pause_s: float = 0.0) -> None:
        self.now_s += pause_s
        due, self.soon = self.soon, []
        for callback, args in due:
            callback(*args)

    def read(self, pressure: OverloadDetector, num_requests: int, allowed_s: float) -> int:
        num_taken = 0
        for _ in range(num_requests):
            if pressure.admits(self, allowed_s):
                self.soon.append((self.work, ()))
                num_taken += 1
            else:
                self.now_s += self.refusal_s
        return num_taken

    def work(self) -> None:
        self.now_s += ANSWER_S

    def offer(
        self, pressure: OverloadDetector, rate_per_s: float, seconds: float, allowed_s: float
    ) -> tuple[int, list[float]]:
        """Offer requests at a constant rate; return how many are answered, and how long the rounds were."""
        end_s, read_s, num_taken, rounds_s = self.now_s + seconds, self.now_s, 0, []
        while self.now_s < end_s:
            began_s = self.now_s
            self.do_all()
            num = int((self.now_s - read_s) * rate_per_s)
            read_s += num / rate_per_s
            num_taken += self.read(pressure, num, allowed_s)
            if self.now_s == began_s:
                self.now_s += 1 / rate_per_s
            rounds_s.append(self.now_s - began_s)
        return num_taken, rounds_s


@pytest.fixture
def loop() -> Any:
    made = Rounds()
    yield made
    made.close()


@pytest.mark.parametrize(("load", "refusal"), [(1.2, 0.1), (2.0, 0.1), (4.0, 0.1), (1.2, 0.4), (2.0, 0.4)])
@pytest.mark.parametrize("allowed_s", [0.05, 0.1, 1.0])
def test_more_than_can_be_answered_leaves_rounds_short_and_the_loop_answering(
    loop: Rounds, load: float, refusal: float, allowed_s: float
) -> None:
    """Include refusals that take most of the time: they do not count as the cost of an answer."""
    pressure, rate_per_s, loop.refusal_s = OverloadDetector(), load / ANSWER_S, refusal * ANSWER_S
    loop.offer(pressure, rate_per_s, 20 * allowed_s, allowed_s)
    num_taken, rounds_s = loop.offer(pressure, rate_per_s, 20 * allowed_s, allowed_s)
    # Five rounds are what a request passes; none is given up whose time would be enough.
    assert max(rounds_s) < 0.2 * allowed_s
    # What is left after the refusals is spent on answers.
    possible_per_s = (1 - rate_per_s * loop.refusal_s) / (ANSWER_S - loop.refusal_s)
    assert num_taken / (20 * allowed_s) > 0.9 * possible_per_s


def test_less_than_can_be_answered_is_all_answered(loop: Rounds) -> None:
    pressure = OverloadDetector()
    num_taken, _ = loop.offer(pressure, 0.9 / ANSWER_S, 2.0, 0.1)
    assert num_taken == pytest.approx(0.9 / ANSWER_S * 2.0, rel=0.01)


def test_a_burst_that_is_soon_over_is_answered(loop: Rounds) -> None:
    pressure = OverloadDetector()
    loop.offer(pressure, 100.0, 0.5, 0.1)
    assert loop.round(pressure, 200, 0.1) == 200


def test_what_comes_at_once_and_cannot_be_answered_in_its_time_is_not_all_taken_on(loop: Rounds) -> None:
    pressure = OverloadDetector()
    loop.offer(pressure, 100.0, 0.5, 0.1)
    num_taken = loop.round(pressure, 5000, 0.1)
    assert 0.5 * 0.1 < num_taken * ANSWER_S < 0.1


def test_one_long_callback_is_no_overload(loop: Rounds) -> None:
    pressure = OverloadDetector()
    for _ in range(20):
        loop.round(pressure, 10, 0.1)
    loop.round(pressure, 10, 0.1, pause_s=3.0)
    assert all(loop.round(pressure, 10, 0.1) == 10 for _ in range(20))


def test_an_overload_ends_with_a_few_rounds_that_are_short(loop: Rounds) -> None:
    pressure = OverloadDetector()
    loop.offer(pressure, 4 / ANSWER_S, 2.0, 0.1)
    assert pressure.waited_s > 0
    for _ in range(6):
        loop.round(pressure, 1, 0.1)
    assert loop.round(pressure, 60, 0.1) == 60
    assert pressure.waited_s <= 2 * ANSWER_S


def test_who_has_more_time_is_taken_on_longer(loop: Rounds) -> None:
    pressure = OverloadDetector()
    loop.offer(pressure, 4 / ANSWER_S, 2.0, 0.1)
    taken = [loop.round(pressure, 500, allowed_s) for allowed_s in (0.05, 0.1, 0.15)]
    assert 0 < taken[0] < taken[1] < taken[2] < 500


def test_who_would_wait_too_long_for_its_batch_is_not_taken_on_where_rounds_are_long(loop: Rounds) -> None:
    pressure = OverloadDetector()
    assert pressure.admits(loop, 0.1, queue_s=10.0)  # rounds are short: whether that is in time, the queue says
    loop.offer(pressure, 4 / ANSWER_S, 2.0, 0.1)
    loop.do_all()
    assert pressure.admits(loop, 0.1, queue_s=10.0)  # the first of a round: else nothing would be answered
    assert pressure.admits(loop, 0.1, queue_s=0.039)
    assert not pressure.admits(loop, 0.1, queue_s=0.041)
    assert not pressure.refuses_less  # a request with less time may have less of the queue ahead of it


@pytest.mark.parametrize("allowed_s", [0.05, 0.1, 1.0])
def test_what_is_refused_at_one_priority_is_refused_at_every_lower_one_and_no_round_is_too_long_for_any(
    loop: Rounds, allowed_s: float
) -> None:
    pressure, rng = OverloadDetector(), random.Random(0)
    loop.offer(pressure, 4 / ANSWER_S, 20 * allowed_s, allowed_s)
    num_refused = dict.fromkeys(range(-2, 3), 0)
    for _ in range(20):
        loop.do_all()
        refused = -3  # the highest priority that was refused in this round
        for _ in range(int(4 * allowed_s / ANSWER_S)):
            priority = rng.choice(list(num_refused))
            if pressure.admits(loop, allowed_s, priority=priority):
                assert priority > refused  # in one round there never is less taken on
                loop.soon.append((loop.work, ()))
            else:
                num_refused[priority] += 1
                refused = max(refused, priority)
        assert pressure.taken_s <= 0.7 * allowed_s + pressure.taken_s / pressure.num_taken
    assert num_refused[-2] > num_refused[2] > 0


def test_nothing_is_called_while_nobody_asks(loop: Rounds) -> None:
    pressure = OverloadDetector()
    for _ in range(20):
        loop.round(pressure, 10, 0.1)
    for _ in range(3):
        loop.round(pressure, 0, 0.1)
    assert not loop.soon

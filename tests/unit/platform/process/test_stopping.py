from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from orchestray.platform.process.stopping import Asked, held_interrupts, kept_termination, stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_asks_once_and_the_second_ends_at_once(first: int, second: int) -> None:
    asked: list[bool] = []
    said: list[str] = []

    number = Asked()

    def interrupted() -> None:
        with stop_on_signals(lambda: asked.append(True), said.append, meanwhile="tidying up", asked=number):
            signal.raise_signal(first)
            assert asked == [True]
            signal.raise_signal(second)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert asked == [True]
    assert number.number == second
    assert said == ["stopping: tidying up (once more to stop at once)"]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 2


def test_in_another_thread_signals_stay_as_they_are() -> None:
    found: list[object] = []

    def work() -> None:
        with stop_on_signals(lambda: None, found.append, meanwhile="tidying up"):
            found.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_IGN] * 2


def interrupted(times: int, done: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with held_interrupts():
        for number in range(times):
            signal.raise_signal(signal.SIGINT)
            done.append(f"after {number + 1}")
    done.append("beyond")


@pytest.mark.parametrize(("times", "done"), [(1, ["after 1"]), (2, ["after 1", "after 2"])])
def test_an_interrupt_comes_after_the_block_that_holds_it(times: int, done: list[str]) -> None:
    found: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(times, found)
    assert found == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_third_interrupt_is_not_held() -> None:
    found: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(5, found)
    assert found == ["after 1", "after 2"]


def test_a_stop_that_was_asked_for_meanwhile_is_heard_once_the_block_has_ended() -> None:
    asked: list[str] = []
    with stop_on_signals(lambda: asked.append("stop"), lambda _text: None, meanwhile="tidying up"):
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert asked == []
        assert asked == ["stop"]


def test_interrupts_that_are_ignored_stay_so() -> None:
    with held_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def as_ray_does(number: int, frame: object) -> None:
    sys.exit(number)


def test_a_programs_own_handler_of_sigterm_outlives_a_start_of_ray() -> None:
    asked: list[bool] = []
    number = Asked()
    with stop_on_signals(lambda: asked.append(True), lambda text: None, meanwhile="tidying up", asked=number):
        with kept_termination():
            signal.signal(signal.SIGTERM, as_ray_does)
        signal.raise_signal(signal.SIGTERM)
    assert (asked, number.number) == ([True], signal.SIGTERM)


def test_sigterm_while_ray_starts_ends_the_start_and_is_known_to_the_programs_own_handler() -> None:
    asked: list[bool] = []

    def start() -> None:
        with stop_on_signals(lambda: asked.append(True), lambda text: None, meanwhile="tidying up"), kept_termination():
            signal.signal(signal.SIGTERM, as_ray_does)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert asked == [True]


def test_a_program_without_a_handler_of_sigterm_keeps_that_of_ray() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with kept_termination():
        signal.signal(signal.SIGTERM, as_ray_does)
    assert signal.getsignal(signal.SIGTERM) is as_ray_does

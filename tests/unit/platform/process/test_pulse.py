"""The pulse of a process: slow work, waits and stuck work differ."""

from __future__ import annotations

import threading
from collections.abc import Generator

from orchestray.platform.data.prefetch import Prefetch
from orchestray.platform.process.pulse import PULSE, Pulse
from orchestray.platform.process.wait_clock import Waiting


class Clock:
    """A clock that is set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_work_is_quiet_since_the_last_progress_that_was_seen() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    assert pulse.sign() is None
    with pulse.work():
        clock.now_s += 3.0
        assert (sign := pulse.sign()) is not None
        assert (sign.quiet_s, sign.is_waiting, sign.share_s) == (3.0, False, 0.0)
        pulse.beats += 2
        pulse.shares += 2
        assert (sign := pulse.sign()) is not None
        assert (sign.quiet_s, sign.share_s) == (0.0, 1.5)
        clock.now_s += 60.0
        assert (sign := pulse.sign()) is not None
        assert (sign.quiet_s, sign.share_s) == (60.0, 1.5), "a share that takes for ever does not make shares slow"
    assert pulse.sign() is None


def test_a_wait_of_the_working_thread_shows_and_its_end_is_progress_that_of_another_does_not() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    with pulse.work():
        clock.now_s += 5.0
        with pulse.waiting(), pulse.waiting():
            assert (sign := pulse.sign()) is not None
            assert (sign.quiet_s, sign.is_waiting) == (5.0, True)
        assert (sign := pulse.sign()) is not None
        assert (sign.quiet_s, sign.is_waiting) == (0.0, False)
        inside, over = threading.Event(), threading.Event()

        def wait() -> None:
            with pulse.waiting():
                inside.set()
                over.wait()

        other = threading.Thread(target=wait)
        other.start()
        inside.wait()
        assert (sign := pulse.sign()) is not None
        assert not sign.is_waiting
        over.set()
        other.join()


def test_shares_that_are_taken_and_waits_for_others_are_the_pulse_of_this_process() -> None:
    with PULSE.work():
        before = PULSE.beats
        with Prefetch(iter_of(3), 1) as items:
            assert len(list(items)) == 3
        assert (PULSE.beats - before, PULSE.shares) == (3, 3)
        with Waiting().during():
            assert PULSE.waits == 1
        assert (PULSE.beats - before, PULSE.waits) == (4, 0)


def iter_of(count: int) -> Generator[int, None, None]:
    yield from range(count)

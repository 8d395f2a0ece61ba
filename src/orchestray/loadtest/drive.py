"""The driver of a load, which sends requests when they are due, and records the outcomes; the clock is an argument."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from orchestray.loadtest.alarm import Alarm
from orchestray.loadtest.tally import Outcome, Tally

_PAUSE_AFTER_ERROR_S = 0.1


Send = Callable[[float, Callable[[Outcome], None]], None]
"""A function that sends a request due at a time of the clock, and later calls the other function once, at its end."""


class Driver:
    """One load.

    Args:
        send: sends the requests.
        tally: records the requests.
        clock: returns seconds; all times refer to it.
        begin_s: beginning of the load, on the clock.
    """

    def __init__(self, send: Send, tally: Tally, clock: Callable[[], float], begin_s: float) -> None:
        self._send_due = send
        self._tally = tally
        self._clock = clock
        self._begin_s = begin_s
        self._loop = asyncio.get_running_loop()
        self._all_sent = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._look: Callable[[], None] = lambda: None
        self.num_pending = 0

    async def open_loop(self, times_s: Iterator[float], alarm: Alarm | None = None) -> None:
        """Send a request at each of these times since the beginning, without waiting for earlier ones.

        Returns when the last request that was due before the end of the tally is answered.
        """
        alarm = alarm or Alarm()
        due_s = next(times_s, None)

        def fire() -> None:
            nonlocal due_s
            while due_s is not None and due_s < self._tally.end_s:
                now_s = self._clock() - self._begin_s
                if due_s > now_s:
                    alarm.at(self._begin_s + due_s, fire)
                    return
                self._send(due_s, now_s, None)
                due_s = next(times_s, None)
            self._finish()

        self._look = fire
        fire()
        try:
            await self._over
        finally:
            alarm.close()

    async def closed_loop(self, num_clients: int, think_s: float) -> None:
        """Let each client send its next request `think_s` after its last ended, until the end of the tally.

        A client that got no answer at all pauses 0.1 s: otherwise a client that is refused at once would retry all the
        time.
        """

        def begin() -> None:
            now_s = max(0.0, self._clock() - self._begin_s)  # a loop's timer may be early by a part of a millisecond
            if now_s < self._tally.end_s:
                self._send(now_s, now_s, again)

        def again(outcome: Outcome) -> None:
            pause_s = think_s if isinstance(outcome, int) else max(think_s, _PAUSE_AFTER_ERROR_S)
            if pause_s:
                self._loop.call_later(pause_s, begin)
            else:
                begin()

        def finish() -> None:
            left_s = self._begin_s + self._tally.end_s - self._clock()
            if left_s > 0:
                self._loop.call_later(left_s, finish)
            else:
                self._finish()

        wait_s = max(0.0, self._begin_s - self._clock())
        for _ in range(num_clients):
            self._loop.call_later(wait_s, begin)
        self._look = finish
        finish()
        await self._over

    def end_at(self, end_s: float) -> None:
        """End the load at that time since its beginning, if it would be longer."""
        self._tally.end_s = min(self._tally.end_s, end_s)
        self._loop.call_later(max(0.0, self._begin_s + end_s - self._clock()), self._look)

    def _send(self, due_s: float, now_s: float, then: Callable[[Outcome], None] | None) -> None:
        self.num_pending += 1
        self._send_due(self._begin_s + due_s, partial(self._answered, due_s, now_s, then))

    def _answered(self, due_s: float, sent_s: float, then: Callable[[Outcome], None] | None, outcome: Outcome) -> None:
        self._tally.record(due_s, sent_s, self._clock() - self._begin_s, outcome)
        self.num_pending -= 1
        if then is not None:
            then(outcome)
        self._check_over()

    def _finish(self) -> None:
        """Finish after the last request was sent: the load is over when none is pending."""
        self._all_sent = True
        self._check_over()

    def _check_over(self) -> None:
        if self._all_sent and self.num_pending == 0 and not self._over.done():
            self._over.set_result(None)

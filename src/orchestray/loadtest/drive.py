"""The driver of a load, which sends requests when they are due, and records the outcomes; the clock is an argument."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from orchestray.loadtest.alarm import Alarm
from orchestray.loadtest.tally import Outcome, Tally

_PAUSE_AFTER_ERROR_S = 0.1


class Sender(Protocol):
    """A sender of requests."""

    def send(self, due_s: float, answered: Callable[[Outcome], None]) -> None:
        """Send one request that was due at `due_s` (on the clock); call `answered` once, later, when it has ended."""


class Driver:
    """One load against one sender.

    Args:
        sender: sends the requests.
        tally: records the requests.
        clock: returns seconds; all times refer to it.
        begin_s: beginning of the load, on the clock.
    """

    def __init__(self, sender: Sender, tally: Tally, clock: Callable[[], float], begin_s: float) -> None:
        self._sender = sender
        self._tally = tally
        self._clock = clock
        self._begin_s = begin_s
        self._loop = asyncio.get_running_loop()
        self._all_sent = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._send_due: Callable[[], None] = lambda: None
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

        self._send_due = fire
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
        num_active = num_clients

        def begin() -> None:
            now_s = max(0.0, self._clock() - self._begin_s)  # a loop's timer may be early by a part of a millisecond
            if now_s < self._tally.end_s:
                self._send(now_s, now_s, again)
            else:
                leave()

        def leave() -> None:
            nonlocal num_active
            num_active -= 1
            if num_active == 0:
                self._finish()

        def again(outcome: Outcome) -> None:
            pause_s = think_s if isinstance(outcome, int) else max(think_s, _PAUSE_AFTER_ERROR_S)
            if pause_s == 0:
                begin()
            elif self._clock() - self._begin_s + pause_s < self._tally.end_s:
                self._loop.call_later(pause_s, begin)
            else:
                leave()

        wait_s = max(0.0, self._begin_s - self._clock())
        for _ in range(num_clients):
            self._loop.call_later(wait_s, begin)
        if num_clients == 0:
            self._finish()
        await self._over

    def end_at(self, end_s: float) -> None:
        """End the load at that time since its beginning, if it would be longer."""
        self._tally.end_s = min(self._tally.end_s, end_s)
        self._loop.call_later(max(0.0, self._begin_s + end_s - self._clock()), self._send_due)

    def _send(self, due_s: float, now_s: float, then: Callable[[Outcome], None] | None) -> None:
        self.num_pending += 1
        self._sender.send(self._begin_s + due_s, partial(self._answered, due_s, now_s, then))

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

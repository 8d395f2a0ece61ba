"""Sends the requests of a load when they are due, and counts what becomes of them. The clock is handed in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from orchestray.serving.load.tally import Outcome, Tally

_PAUSE_AFTER_ERROR_S = 0.1


class Sender(Protocol):
    """Sends requests."""

    def send(self, due_s: float, answered: Callable[[Outcome], None]) -> None:
        """Send one request that was due then (on the clock), and call `answered` once, when it ended, later on."""


class Alarm(Protocol):
    """Calls at a moment of the clock."""

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call then, or as soon as possible where that is past; takes the place of what was set before."""

    def close(self) -> None:
        """Call nothing any more."""


class Driver:
    """One load against one sender.

    Args:
        sender: for the requests.
        tally: counts them.
        clock: seconds, on which all is due.
        begin_s: when the load begins, on the clock.
    """

    def __init__(self, sender: Sender, tally: Tally, clock: Callable[[], float], begin_s: float) -> None:
        self._sender = sender
        self._tally = tally
        self._clock = clock
        self._begin_s = begin_s
        self._loop = asyncio.get_running_loop()
        self._num_pending = 0
        self._all_sent = False
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def open_loop(self, times_s: Iterator[float], alarm: Alarm) -> None:
        """Send a request at each of these times since the beginning, whatever becomes of those before.

        Returns when the last one that was due before the end of the tally is answered.
        """
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

        fire()
        await self._over

    async def closed_loop(self, num_clients: int, think_s: float) -> None:
        """Have each client send its next request `think_s` after its last ended, until the end of the tally.

        A client that got no answer at all pauses 0.1 s: one that is refused at once would do nothing but try.
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
            if self._clock() - self._begin_s + pause_s >= self._tally.end_s:
                leave()
            elif pause_s > 0:
                self._loop.call_later(pause_s, begin)
            else:
                begin()

        wait_s = max(0.0, self._begin_s - self._clock())
        for _ in range(num_clients):
            self._loop.call_later(wait_s, begin)
        if num_clients == 0:
            self._finish()
        await self._over

    def _send(self, due_s: float, now_s: float, then: Callable[[Outcome], None] | None) -> None:
        self._tally.offer(due_s, now_s)
        self._num_pending += 1
        self._sender.send(self._begin_s + due_s, partial(self._answered, due_s, then))

    def _answered(self, due_s: float, then: Callable[[Outcome], None] | None, outcome: Outcome) -> None:
        self._tally.answer(due_s, self._clock() - self._begin_s, outcome)
        self._num_pending -= 1
        if then is not None:
            then(outcome)
        if self._all_sent and self._num_pending == 0 and not self._over.done():
            self._over.set_result(None)

    def _finish(self) -> None:
        """The last request is sent: over when none is pending."""
        self._all_sent = True
        if self._num_pending == 0 and not self._over.done():
            self._over.set_result(None)

"""How much a process has taken on: where more requests come than it can read, some are refused while they are cheap.

A server that reads everything answers nothing in time: each request waits behind all that came before it. The event
loop works in rounds: it reads what has come, then does what was read. What is taken on in one round is what the next
one waits for, so that a bound on the work of a round is one on the wait of every request.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

_SHARE = 0.1
"""Of a request's time, how much work may be taken on in the round it is read in. It passes about five such rounds: it
waits to be read, is read, waits for its batch, is in it, and is answered."""
_LASTING_SHARE = 0.05
_LASTING_ROUNDS = 5
"""Most of so many are long before it counts: one long callback, as when a model is loaded, is no overload."""
_KNOWN_ROUNDS = 9


class Pressure:
    """Watches the rounds of an event loop while requests come: how long they are, and what a request adds to them."""

    def __init__(self) -> None:
        self._is_watching = False
        self._began_s: float | None = None
        """When the round began whose requests are worked on now."""
        self._num_before = 0
        self._num = 0
        self._rounds_s: deque[float] = deque(maxlen=_LASTING_ROUNDS)
        self._costs_s: deque[float] = deque(maxlen=_KNOWN_ROUNDS)
        self._cost_s = self._lasting_s = 0.0

    @property
    def lasting_s(self) -> float:
        """Seconds that most of the last rounds took; 0 where there is no lasting load."""
        return self._lasting_s

    @property
    def waited_s(self) -> float:
        """How long a request that is read now has waited for that, at most; 0 where rounds are few."""
        return self._rounds_s[-1] if self._lasting_s else 0.0

    @property
    def taken_s(self) -> float:
        """Seconds of work taken on in this round."""
        return self._num * self._cost_s

    def admits(self, loop: asyncio.AbstractEventLoop, allowed_s: float) -> bool:
        """Take on a request that has so many seconds; or not, where it and others would come late.

        The first of a round is always taken on, and all are where the rounds are short: nothing piles up.
        """
        if not self._is_watching:
            self._is_watching = True
            loop.call_soon(self._end_round, loop)
        if self._lasting_s > _LASTING_SHARE * allowed_s and self.taken_s > _SHARE * allowed_s:
            return False
        self._num += 1
        return True

    def _end_round(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        if self._began_s is not None:
            seconds = now_s - self._began_s
            self._rounds_s.append(seconds)
            if len(self._rounds_s) == _LASTING_ROUNDS:
                self._lasting_s = statistics.median_low(self._rounds_s)
            self._costs_s.append(seconds / self._num_before)
            self._cost_s = statistics.median_low(self._costs_s)
        self._num_before, self._num = self._num, 0
        if self._num_before:
            self._began_s = now_s
            loop.call_soon(self._end_round, loop)
        else:
            self._began_s, self._is_watching = None, False
            self._rounds_s.clear()
            self._lasting_s = 0.0

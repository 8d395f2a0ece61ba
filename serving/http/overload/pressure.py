"""Overload detection: if more requests come than a process can read, some are refused while that is cheap.

A server that reads everything answers nothing in time: each request waits behind all that came before it. The event
loop works in rounds: it reads what has come, then does what was read. The work accepted in one round delays the next.
So a bound on the work of a round is a bound on the wait of every request.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

_SHARE = 0.1
"""Largest work to accept in a round, as a fraction of the time of a request read in it.

A request passes about five such rounds: it waits to be read, is read, waits for its batch, is in it, and is answered.
"""
_WAITING_SHARE = 0.4
"""Longest wait for its batch, as a fraction of a request's time, while rounds are long."""
_MOST_SHARE = 0.7
"""Largest work in a round without lasting load, as a fraction of a request's time.

With more the request would certainly be late, as would those that come meanwhile.
"""
_MOST_REFUSING = 0.9
"""Largest fraction of a round for refusals by which the limit on accepted work is lowered.

Refusals take time on top of that work, and rounds must not become longer.
"""
_REFUSING_RATE = 0.2
_LASTING_SHARE = 0.05
_LASTING_ROUNDS = 3
"""Number of rounds of which most must be long: one long callback, as when a model is loaded, is not an overload."""
_KNOWN_ROUNDS = 9


class OverloadDetector:
    """A monitor of an event loop's rounds under load: their length, the cost per request, and the share of refusals."""

    def __init__(self) -> None:
        self._is_watching = False
        self._began_s: float | None = None
        """Start of the round whose requests are worked on now."""
        self._num_before = self.num_taken = 0
        """Requests accepted in this round; `_num_before`: in the last one."""
        self._nums: dict[int, int] = {}
        """Number of requests accepted in this round, by priority."""
        self._last_priority = 0
        """Priority of the request that was accepted last."""
        self._reading_s: float | None = None
        """Time at which the first request of this round was read."""
        self._num_refused = 0
        self.refuses_less = False
        """True if the last refusal holds for requests with less time too; else these wait for less of the queue."""
        self.number = 0
        """Number of this round."""
        self._rounds_s: deque[float] = deque(maxlen=_LASTING_ROUNDS)
        self._costs_s: deque[float] = deque(maxlen=_KNOWN_ROUNDS)
        self._cost_s = self._lasting_s = self._refusing = 0.0

    @property
    def waited_s(self) -> float:
        """Longest time that a request that is read now has waited for that; 0 without lasting load."""
        return self._rounds_s[-1] if self._lasting_s else 0.0

    @property
    def taken_s(self) -> float:
        """Seconds of work accepted in this round, without refusals."""
        return self.num_taken * self._cost_s

    def admits(
        self, loop: asyncio.AbstractEventLoop, allowed_s: float, queue_s: float = 0.0, priority: int = 0
    ) -> bool:
        """Accept a request, or return False if it, and others with it, would be late.

        The first request of a round is accepted. Without lasting load, so are all whose work fits into one round.
        Requests of lower priority leave room for one of higher priority, until that would be late for certain. If a
        request is refused, any of lower priority and with as much time would be refused too.

        Args:
            loop: event loop that reads it.
            allowed_s: seconds until its deadline.
            queue_s: seconds of work that waits ahead of it (see `Batcher.queue_s`).
            priority: higher goes first.
        """
        if not self._is_watching:
            self._is_watching = True
            loop.call_soon(self._end_round, loop)
        if self._reading_s is None:
            self._reading_s = loop.time()
        most_s = _SHARE * allowed_s * (1 - self._refusing)
        num_ahead = sum(num for other, num in self._nums.items() if other >= priority)
        is_late = queue_s > _WAITING_SHARE * allowed_s and num_ahead > 0
        is_lasting = self._lasting_s > _LASTING_SHARE * allowed_s
        is_much = (is_lasting and num_ahead * self._cost_s > most_s) or self.taken_s > _MOST_SHARE * allowed_s
        if is_much or (is_lasting and is_late):
            self._num_refused += 1
            self.refuses_less = is_much
            return False
        self.num_taken += 1
        self._nums[priority] = self._nums.get(priority, 0) + 1
        self._last_priority = priority
        return True

    def refused_again(self) -> None:
        """Count one more refusal for the last reason, which holds for the rest of the round."""
        self._num_refused += 1

    def refused(self) -> None:
        """Count the request that was accepted last as refused after all, at the same cost."""
        self.num_taken -= 1
        self._nums[self._last_priority] -= 1
        self._num_refused += 1

    def _end_round(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        if self._began_s is not None:
            seconds = now_s - self._began_s
            self._rounds_s.append(seconds)
            if len(self._rounds_s) == _LASTING_ROUNDS:
                self._lasting_s = statistics.median_low(self._rounds_s)
            refusing_s = self._refusing_s(now_s)
            if seconds > 0:
                share = min(refusing_s / seconds, _MOST_REFUSING)
                self._refusing += _REFUSING_RATE * (share - self._refusing)
            if self._num_before:
                self._costs_s.append(max(0.0, seconds - refusing_s) / self._num_before)
                self._cost_s = statistics.median_low(self._costs_s)
        is_busy = bool(self.num_taken or self._num_refused)
        self._num_before, self.num_taken = self.num_taken, 0
        self._nums.clear()
        self._num_refused, self._reading_s = 0, None
        self.number += 1
        if is_busy:
            self._began_s = now_s
            loop.call_soon(self._end_round, loop)
        else:
            self._began_s, self._is_watching = None, False
            # The cost of a request is kept, to judge a burst after a pause.
            self._rounds_s.clear()
            self._lasting_s = self._refusing = 0.0

    def _refusing_s(self, now_s: float) -> float:
        """Return the seconds that this round's refusals took; they are read and written before anything else."""
        if self._reading_s is None or not self._num_refused:
            return 0.0
        return (now_s - self._reading_s) * self._num_refused / (self._num_refused + self.num_taken)

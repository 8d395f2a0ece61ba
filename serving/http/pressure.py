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
_WAITING_SHARE = 0.4
"""Of a request's time, how long it may wait for its batch, while rounds are long."""
_MOST_SHARE = 0.7
"""Of a request's time, how much work may be taken on in a round where nothing is known to last: more is late for
certain, and what comes meanwhile would be too."""
_MOST_REFUSING = 0.9
"""Of a round, what refusals can take, as far as what is taken on follows that. Their time comes on top of what is taken
on, and rounds are to stay as short."""
_REFUSING_RATE = 0.2
_LASTING_SHARE = 0.05
_LASTING_ROUNDS = 3
"""Most of so many are long before it counts: one long callback, as when a model is loaded, is no overload."""
_KNOWN_ROUNDS = 9


class Pressure:
    """Watches the rounds of an event loop while requests come: how long they are, what a request adds to them, and what
    part of them goes into refusing.
    """

    def __init__(self) -> None:
        self._is_watching = False
        self._began_s: float | None = None
        """When the round began whose requests are worked on now."""
        self._num_before = self._num = 0
        """Requests taken on in the last round, and in this one."""
        self._nums: dict[int, int] = {}
        """Those of this round by their priority."""
        self._last_priority = 0
        """Of the one that was taken on last."""
        self._reading_s: float | None = None
        """When the first request of this round was read."""
        self._num_refused = 0
        self.refuses_less = False
        """Whether what was refused last would be with less time too: who has less waits for less of the queue."""
        self.number = 0
        """Of this round."""
        self._rounds_s: deque[float] = deque(maxlen=_LASTING_ROUNDS)
        self._costs_s: deque[float] = deque(maxlen=_KNOWN_ROUNDS)
        self._cost_s = self._lasting_s = self._refusing = 0.0

    @property
    def lasting_s(self) -> float:
        """Seconds that most of the last rounds took; 0 where there is no lasting load."""
        return self._lasting_s

    @property
    def waited_s(self) -> float:
        """How long a request that is read now has waited for that, at most; 0 where rounds are few."""
        return self._rounds_s[-1] if self._lasting_s else 0.0

    @property
    def num_taken(self) -> int:
        """Requests taken on in this round."""
        return self._num

    @property
    def taken_s(self) -> float:
        """Seconds of work taken on in this round; what is refused in it comes on top."""
        return self._num * self._cost_s

    def admits(
        self, loop: asyncio.AbstractEventLoop, allowed_s: float, queue_s: float = 0.0, priority: int = 0
    ) -> bool:
        """Take on a request that has so many seconds; or not, where it and others would come late.

        The first of a round is taken on, and where no load lasts all are whose work is not too much for one round.
        Requests of a lower priority leave no less room to one of a higher priority, until it would be late for certain:
        where one is refused, so is in its place, with as much time, any of a lower priority.

        Args:
            loop: the one that reads it.
            allowed_s: until its deadline.
            queue_s: seconds in which what waits ahead of it is run (see `Batcher.queue_s`).
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
        self._num += 1
        self._nums[priority] = self._nums.get(priority, 0) + 1
        self._last_priority = priority
        return True

    def refused_again(self) -> None:
        """One more was refused, for the reason of the one before: in one round there never is less taken on."""
        self._num_refused += 1

    def refused(self) -> None:
        """The request that was taken on last is refused all the same, as cheaply."""
        self._num -= 1
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
        is_busy = bool(self._num or self._num_refused)
        self._num_before, self._num = self._num, 0
        self._nums.clear()
        self._num_refused, self._reading_s = 0, None
        self.number += 1
        if is_busy:
            self._began_s = now_s
            loop.call_soon(self._end_round, loop)
        else:
            self._began_s, self._is_watching = None, False
            # What a request costs is still known: a burst after a pause is taken on by that.
            self._rounds_s.clear()
            self._lasting_s = self._refusing = 0.0

    def _refusing_s(self, now_s: float) -> float:
        """What this round's refusals took: they are read and written before anything else is done."""
        if self._reading_s is None or not self._num_refused:
            return 0.0
        return (now_s - self._reading_s) * self._num_refused / (self._num_refused + self._num)

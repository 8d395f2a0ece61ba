"""Measurement of cold starts: the time that requests wait for a runner if there is none."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_KNOWN = 5
_LEAST_OUTAGE_S = 10.0
"""Shortest outage: a loss must first be noticed."""


class ColdStart:
    """A timer from the first request that finds no runner to the first runner, on the loop's clock."""

    def __init__(self) -> None:
        self._known_s: deque[float] = deque(maxlen=_NUM_KNOWN)
        self._asked_s: float | None = None
        """Time of the first request that found no runner."""
        self._gone_s: float | None = None
        """Time at which the last runner went; None while there is one."""

    @property
    def seconds(self) -> float | None:
        """Median of the last few starts, so that one outage is not expected again; None: nothing is known."""
        return statistics.median_low(self._known_s) if self._known_s else None

    def expect(self, seconds: float) -> None:
        """Record the length of an earlier start."""
        self._known_s.append(seconds)

    def asked(self, now_s: float) -> None:
        """Note a request that found no runner."""
        if self._asked_s is None:
            self._asked_s = now_s

    def gone(self, now_s: float) -> None:
        """Note that the last runner has gone."""
        self._gone_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Return True if the last runner has been gone clearly longer than a new one takes to start."""
        return self._gone_s is not None and now_s - self._gone_s > self._longest_s

    def is_awaited(self, now_s: float) -> bool:
        """Return True if requests found no runner, not longer ago than a new one may well take to start."""
        return self._asked_s is not None and now_s - self._asked_s <= self._longest_s

    @property
    def _longest_s(self) -> float:
        return max(_LEAST_OUTAGE_S, 2 * (self.seconds or 0.0))

    def ended(self, now_s: float) -> None:
        """Note that a first runner exists."""
        self._gone_s = None
        if self._asked_s is not None:
            self._known_s.append(now_s - self._asked_s)
            self._asked_s = None

    def left_s(self, now_s: float) -> float:
        """Return the seconds until a runner is expected; 0 if nothing is known or it is overdue."""
        seconds = self.seconds
        if seconds is None:
            return 0.0
        return max(0.0, seconds - (0.0 if self._asked_s is None else now_s - self._asked_s))

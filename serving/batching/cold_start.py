"""What it takes until a runner is there where there is none: whoever comes meanwhile waits that long."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_KNOWN = 5
_LEAST_OUTAGE_S = 10.0
"""A loss may first have to be noticed by who starts another, and of several fronts one knows only its own, short start.
"""


class ColdStart:
    """Measured from the first request that finds no runner to the first runner, on the loop's clock."""

    def __init__(self) -> None:
        self._known_s: deque[float] = deque(maxlen=_NUM_KNOWN)
        self._asked_s: float | None = None
        """When the first request came that found no runner."""
        self._gone_s: float | None = None
        """When the last runner went, while there is none."""

    @property
    def seconds(self) -> float | None:
        """Of the last few the median, so that one outage is not expected again; None: nothing is known."""
        return statistics.median_low(self._known_s) if self._known_s else None

    def expect(self, seconds: float) -> None:
        """It took so long at another time."""
        self._known_s.append(seconds)

    def asked(self, now_s: float) -> None:
        """A request came, and there is no runner."""
        if self._asked_s is None:
            self._asked_s = now_s

    def gone(self, now_s: float) -> None:
        """The last runner has gone."""
        self._gone_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether the last runner has been gone for clearly longer than another takes to come."""
        return self._gone_s is not None and now_s - self._gone_s > max(_LEAST_OUTAGE_S, 2 * (self.seconds or 0.0))

    def ended(self, now_s: float) -> None:
        """The first runner is there."""
        self._gone_s = None
        if self._asked_s is not None:
            self._known_s.append(now_s - self._asked_s)
            self._asked_s = None

    def left_s(self, now_s: float) -> float:
        """Seconds until a runner is expected; 0 where nothing is known, or it is later than expected."""
        seconds = self.seconds
        if seconds is None:
            return 0.0
        return max(0.0, seconds - (0.0 if self._asked_s is None else now_s - self._asked_s))

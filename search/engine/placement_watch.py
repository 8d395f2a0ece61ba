"""A watch for searches that wait for resources which others hold. Independent of Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class PlacementWatch:
    """A watch that reports when no process of a search has had resources for a while, since Ray and Tune stay silent.

    It reports once per occurrence.
    """

    def __init__(self, say: Callable[[], None], *, patience_s: float, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            say: called when it happens.
            patience_s: seconds that processes may be without resources.
            clock: returns the time in seconds.
        """
        self._say, self._patience_s, self._clock = say, patience_s, clock
        self._since_s = clock()
        """Time since which no process is known to have resources; infinite after the report."""

    def look(self, *, is_under_way: bool, has_place: Callable[[], bool]) -> None:
        """Check for a shortage; to be called regularly.

        Args:
            is_under_way: True if a trial is in a process.
            has_place: returns True if a process has resources, even if it is still starting; called only if needed.
        """
        now_s = self._clock()
        if not is_under_way and now_s - self._since_s <= self._patience_s:
            return
        if is_under_way or has_place():
            self._since_s = now_s
        else:
            self._since_s = math.inf
            self._say()

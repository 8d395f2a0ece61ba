"""Whether a search waits for places that others hold. Knows no Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Scarcity:
    """Says that no process of a search has found a place for so long: Ray and Tune wait for one in silence.

    Once each time that it comes to this.
    """

    def __init__(self, say: Callable[[], None], *, patience_s: float, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            say: called once it has come to this.
            patience_s: how long a process may have no place.
            clock: in seconds.
        """
        self._say, self._patience_s, self._clock = say, patience_s, clock
        self._since_s = clock()
        """From when on no process is known to have a place; infinite: that was said."""

    def look(self, *, is_under_way: bool, has_place: Callable[[], bool]) -> None:
        """To be called again and again.

        Args:
            is_under_way: whether a trial is in a process.
            has_place: whether a process has a place, be it that it is still starting; asked only if it matters.
        """
        now_s = self._clock()
        if not is_under_way and now_s - self._since_s <= self._patience_s:
            return
        if is_under_way or has_place():
            self._since_s = now_s
        else:
            self._since_s = math.inf
            self._say()

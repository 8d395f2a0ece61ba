"""How many processes of trials are worth starting at once. Knows no Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


class Crowd:
    """Says whether one more trial may begin.

    A process spends seconds of a core on its imports before it trains. Where trials share cores, those beyond the cores
    only hold up the first while all start; and trials that end sooner than another process would be there are done
    sooner without it. So there is one for each core at once, and a further one, one after the other, whenever a trial
    has been under way for twice as long as the first took to answer: the first ones have waited for their process, too.
    """

    def __init__(self, parallel: int, cores: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            parallel: trials at once, at most.
            cores: that they share.
            clock: in seconds.
        """
        self._parallel, self._cores, self._clock = parallel, max(1.0, cores), clock
        self._made_s = self._further_s = clock()
        self._start_s = math.inf
        """That the first answer took from the beginning."""
        self._began_s: dict[str, float] = {}
        """When each trial under way began, by its process."""

    def has_room(self) -> bool:
        """Whether one more may begin now."""
        num = len(self._began_s)
        if num >= self._parallel or num + 1 <= self._cores:
            return num < self._parallel
        now_s = self._clock()
        oldest_s = now_s - min(self._began_s.values())
        return oldest_s > 2 * self._start_s and now_s - self._further_s > self._start_s

    def began(self, process: str) -> None:
        """A trial begins in this process."""
        now_s = self._clock()
        if len(self._began_s) + 1 > self._cores:
            self._further_s = now_s
        self._began_s[process] = now_s

    def answered(self) -> None:
        """A process has carried out an order."""
        if math.isinf(self._start_s):
            self._start_s = self._clock() - self._made_s

    def left(self, process: str) -> None:
        """The trial of this process is over."""
        self._began_s.pop(process, None)


def cores_of(total: Mapping[str, float] | None) -> float:
    """The cores that trials share; None: each has a place of its own."""
    return math.inf if total is None else total.get("CPU", 1.0)

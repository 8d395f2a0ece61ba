"""A throttle on the number of trial processes started at once. Independent of Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


class StartThrottle:
    """A throttle that decides if one more trial may begin.

    A process spends seconds of CPU time on its imports before it trains. Where trials share cores, more processes than
    cores delay the first ones, and short trials end sooner without another process. So at first there is one process
    per core. A further one is started whenever a trial has been running for twice as long as the first answer took.
    That time includes the start of a process.
    """

    def __init__(self, parallel: int, cores: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            parallel: maximum number of concurrent trials.
            cores: number of cores that they share.
            clock: returns the time in seconds.
        """
        self._parallel, self._cores, self._clock = parallel, max(1.0, cores), clock
        self._made_s = self._further_s = clock()
        self._start_s = math.inf
        """Seconds from the beginning to the first answer."""
        self._began_s: dict[str, float] = {}
        """Time at which each running trial began, by its process."""

    def has_room(self) -> bool:
        """Return True if one more trial may begin now."""
        num = len(self._began_s)
        if num >= self._parallel or num + 1 <= self._cores:
            return num < self._parallel
        now_s = self._clock()
        oldest_s = now_s - min(self._began_s.values())
        return oldest_s > 2 * self._start_s and now_s - self._further_s > self._start_s

    def began(self, process: str) -> None:
        """Record that a trial begins in this process."""
        now_s = self._clock()
        if len(self._began_s) + 1 > self._cores:
            self._further_s = now_s
        self._began_s[process] = now_s

    def answered(self) -> None:
        """Record that a process has completed a task."""
        if math.isinf(self._start_s):
            self._start_s = self._clock() - self._made_s

    def left(self, process: str) -> None:
        """Record that the trial of this process is over."""
        self._began_s.pop(process, None)


def cores_of(total: Mapping[str, float] | None) -> float:
    """Return the number of cores that trials share; infinite if each has resources of its own (None)."""
    return math.inf if total is None else total.get("CPU", 1.0)

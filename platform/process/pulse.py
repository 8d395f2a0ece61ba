"""The pulse of this process: signs that its work goes on, for a driver that has to tell slow from stuck."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Sign:
    """The state of a process that is at work."""

    quiet_s: float
    """Seconds without progress, as far as it was seen."""
    is_waiting: bool
    """True if it waits for other processes, so that one of them may be the reason."""
    share_s: float
    """Mean seconds from one share of samples to the next; 0 before the first."""


class Pulse:
    """A counter of the progress of one thread's work, which other threads may look at.

    Progress is a share of samples to compute, the end of a wait for other processes, or a piece of a file. The counters
    are changed directly, without a call, because that happens several times a step.

    Attributes:
        beats: number of signs of progress.
        shares: number of shares of samples among them.
        waits: number of waits for other processes in which the thread is now.
        thread: identifier of the thread at work; None: nobody is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.beats = self.shares = self.waits = 0
        self.thread: int | None = None
        self._began_s = self._seen_s = 0.0
        self._seen_beats = 0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Watch the work of this thread inside the context."""
        self.shares = self.waits = 0
        self._seen_beats = self.beats
        self._began_s = self._seen_s = self._clock()
        self.thread = threading.get_ident()
        try:
            yield
        finally:
            self.thread = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this thread waits for other processes inside the context, and that the end of that is progress."""
        if threading.get_ident() != self.thread:
            yield
            return
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            self.beats += 1

    def sign(self) -> Sign | None:
        """Return the state of the work since it was last asked for; None if nobody is at work."""
        if self.thread is None:
            return None
        now_s = self._clock()
        if self.beats != self._seen_beats:
            self._seen_beats, self._seen_s = self.beats, now_s
        share_s = (self._seen_s - self._began_s) / self.shares if self.shares else 0.0
        return Sign(now_s - self._seen_s, self.waits > 0, share_s)


PULSE = Pulse()
"""The pulse of this process, which does one work at a time."""

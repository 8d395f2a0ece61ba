"""The time a worker waits until others have come as far as it has, or have sent what it needs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class StreamClock(Protocol):
    """The clock of a GPU's stream (`gpu.Gpu`)."""

    def mark(self) -> Any:
        """Return a mark in the stream, behind all work so far."""

    def seconds_between(self, first: Any, second: Any) -> float | None:
        """Return the seconds between two marks; None if the stream has not come to the second one yet."""


class Waiting:
    """A clock that adds up the seconds of every wait of one worker; any thread may report waits.

    A wait for a message ends when the message is complete. It thus includes the transfer time, unless the worker
    computed meanwhile. On a GPU it is the stream that waits, or computes meanwhile, whatever the CPU does. So marks
    before and behind a wait measure how long the stream stood still.

    Attributes:
        stream: the clock of the stream that waits; None: the CPU does.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stream: StreamClock | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._marked: list[tuple[Any, Any]] = []
        """Marks around waits that the stream has not come to the end of."""

    @property
    def total_s(self) -> float:
        """Total seconds of the waits that are over."""
        if self._marked:
            with self._lock:
                self._read_marks()
        return self._total_s

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Count the time within the context as a wait, even if it ends with an error."""
        began_s = self._clock()
        before = None if self.stream is None else self.stream.mark()
        is_at_work = threading.get_ident() == PULSE.thread  # `PULSE.waiting`, without its calls: every step waits
        PULSE.waits += is_at_work
        try:
            yield
        finally:
            PULSE.waits -= is_at_work
            PULSE.beats += is_at_work
            took_s = self._clock() - began_s
            after = None if self.stream is None else self.stream.mark()
            with self._lock:
                if after is None:
                    self._total_s += took_s
                else:
                    self._marked.append((before, after))

    def _read_marks(self) -> None:
        """Add the waits whose marks the stream has passed."""
        assert self.stream is not None
        left = []
        for before, after in self._marked:
            stood_still_s = self.stream.seconds_between(before, after)
            if stood_still_s is None:
                left.append((before, after))
            else:
                self._total_s += stood_still_s
        self._marked = left

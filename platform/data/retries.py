"""Reads that are tried again: an error that passes must not end a run of days."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from orchestray.platform.data.read_errors import failure_of
from orchestray.platform.errors import OrchestrayError

WAITS_S: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Longest waits before a read is tried again, half a minute together; each is cut at random, by at most one half.

Workers that failed at the same moment do not all come back at the same moment.
"""

STOP: ContextVar[threading.Event | None] = ContextVar("STOP", default=None)
"""An event that ends the waits of this thread; set before another thread waits for its end."""

Value = TypeVar("Value")

_cut = random.Random()


class ReadCounter:
    """A counter of the reads of this process that were tried again, which does one work at a time (like `PULSE`).

    Attributes:
        num_retries: number of reads that failed, and were tried again.
    """

    def __init__(self) -> None:
        self.num_retries = 0
        self._warn: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    def begin(self, warn: Callable[[str], None] | None) -> None:
        """Count from 0 on.

        Args:
            warn: receives a sentence for the user, from any thread; None: nobody listens.
        """
        with self._lock:
            self.num_retries, self._warn = 0, warn

    def warn(self, text: str) -> None:
        """Tell the user, if anybody listens."""
        if (warn := self._warn) is not None:
            warn(text)

    def count(self, place: str, reason: str) -> None:
        """Count a read of `place` that is tried again."""
        with self._lock:
            self.num_retries += 1
        self.warn(f"cannot read {place} at the moment: {reason.removeprefix(f'{place}: ')}. It is tried again")


READS = ReadCounter()
"""The counter of this process."""


def read_patiently(read: Callable[[], Value], place: str, *, was_there: bool = False) -> Value:
    """Return `read()`; after an error that may pass, try again, with growing waits, until this thread is to `STOP`.

    Args:
        read: function that reads, once a call.
        place: what it reads, for messages.
        was_there: True if the same file was found before.

    Raises:
        DataError: it cannot be read. An `OrchestrayError` of `read`, and an error of another kind, goes on unchanged.
    """
    stop = STOP.get() or threading.Event()
    for wait_s in (*WAITS_S, None):
        try:
            return read()
        except OrchestrayError:
            raise
        except Exception as error:
            failure = failure_of(error, was_there=was_there)
            if failure is None:
                raise
            if not failure.passes or stop.is_set():
                raise failure.error(place) from error
            if wait_s is None:
                tried = f"It was tried {len(WAITS_S) + 1} times in about {sum(WAITS_S) * 0.75:.0f} s"
                raise failure.error(place, tried) from error
            READS.count(place, failure.reason)
            if stop.wait(wait_s * _cut.uniform(0.5, 1.0)):
                raise failure.error(place) from error
    raise AssertionError("the last try returns or raises")

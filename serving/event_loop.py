"""The event loop of an endpoint: uvloop, with a clock that is fine enough to learn service times from."""

from __future__ import annotations

import time

import uvloop


class FineLoop(uvloop.Loop):
    """uvloop with the time of the same clock in nanoseconds.

    Its own counts whole milliseconds, and stands still while callbacks run: a model that answers in less takes no time
    by it, so nothing is learned of it, and a wait of less does not end before the next millisecond. Timers still begin
    at whole milliseconds; who needs less is called again at once, and looks.
    """

    def time(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

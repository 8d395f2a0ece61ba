"""The event loop of an endpoint: uvloop, with a clock that is fine enough to learn service times from."""

from __future__ import annotations

import time

import uvloop


class FineLoop(uvloop.Loop):
    """A uvloop whose clock has nanoseconds.

    uvloop's own time counts whole milliseconds, and stands still while callbacks run. A model that answers faster would
    take no time, so that nothing could be learned about it. A shorter wait would last until the next millisecond.
    Timers still fire at whole milliseconds; code that needs finer ones must check the time again.
    """

    time = staticmethod(time.monotonic)
    """Return the seconds of a clock that never goes back."""

"""The worker's side of recording: the training loop leaves lines in memory, and the driver fetches them in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

KEPT_LINES = 8192


class Recorder:
    """A queue of metric lines between one training loop and one reader in another thread.

    `record` does no I/O and takes no lock that is held for long, so that it never blocks a step. Drained lines are kept
    for a while: if the process that should write them dies, a surviving process still has its copy.
    """

    def __init__(self, kept_lines: int = KEPT_LINES) -> None:
        self._pending: deque[dict[str, Any]] = deque()
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept_lines)
        self._moving = threading.Lock()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._last_drain_s = float("-inf")

    def record(self, line: dict[str, Any]) -> None:
        """Leave `line` (JSON values, including `step`) for the reader; it must not be changed afterwards."""
        self._pending.append(line)
        if not self._ready.is_set():
            self._ready.set()

    def drain(self, timeout_s: float, min_interval_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the lines recorded since the last call, in order; wait up to `timeout_s` seconds for the first.

        Two results are at least `min_interval_s` apart, so that a fast loop is read in batches. After `close` the rest
        is returned at once, and then nothing.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._closed.is_set():
            self._ready.wait(timeout_s)
            earliest_s = min(self._last_drain_s + min_interval_s, deadline_s)
            self._closed.wait(max(0.0, earliest_s - time.monotonic()))
        # Cleared before the lines are taken: a line recorded from here on sets it again, so none is missed.
        if not self._closed.is_set():
            self._ready.clear()
        with self._moving:
            lines = [self._pending.popleft() for _ in range(len(self._pending))]
            self._kept.extend(lines)
        self._last_drain_s = time.monotonic()
        return lines

    def since(self, step: int) -> list[dict[str, Any]]:
        """Return the kept lines of steps > `step`, in order: undrained ones and the last `kept_lines` drained ones."""
        with self._moving:
            lines = [*self._kept.copy(), *self._pending.copy()]
        return [line for line in lines if int(line.get("step", 0)) > step]

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps > `step`, drained or not: training, which is stopped now, goes back to `step`."""
        with self._moving:
            for lines in (self._kept, self._pending):
                left = [line for line in lines.copy() if int(line.get("step", 0)) <= step]
                lines.clear()
                lines.extend(left)

    def wake(self) -> None:
        """Make a waiting `drain` return now, with the lines there are."""
        self._ready.set()

    def close(self) -> None:
        """End the recording: a waiting `drain` returns the lines there are."""
        self._closed.set()
        self._ready.set()

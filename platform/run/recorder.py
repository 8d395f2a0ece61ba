"""The worker's side of recording: the loop leaves lines in memory, the driver fetches them in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

KEPT_LINES = 8192


class Recorder:
    """A queue of metric lines between one training loop and one reader of another thread.

    `record` does no I/O and takes no lock that is ever held for long, so that it never blocks a step. Lines that were
    drained are kept for a while: when the process that was to write them dies, a survivor's copy still has them.
    """

    def __init__(self, kept_lines: int = KEPT_LINES) -> None:
        self._pending: deque[dict[str, Any]] = deque()
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept_lines)
        self._moving = threading.Lock()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._last_drain_s = float("-inf")

    def record(self, line: dict[str, Any]) -> None:
        """Leave `line` (JSON values, `step` among them) for the reader; it must not be changed afterwards."""
        self._pending.append(line)
        if not self._ready.is_set():
            self._ready.set()

    def drain(self, timeout_s: float, min_interval_s: float = 0.0) -> list[dict[str, Any]]:
        """The lines recorded since the last call, in order; waits up to `timeout_s` seconds for the first.

        Two answers are at least `min_interval_s` apart, so that a fast loop is read in batches. After `close` it
        returns what is left at once, and then nothing.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._closed.is_set():
            self._ready.wait(timeout_s)
            earliest_s = min(self._last_drain_s + min_interval_s, deadline_s)
            self._closed.wait(max(0.0, earliest_s - time.monotonic()))
        # Cleared before the lines are taken: a line recorded from here on sets it again, so none is overlooked.
        if not self._closed.is_set():
            self._ready.clear()
        with self._moving:
            lines = [self._pending.popleft() for _ in range(len(self._pending))]
            self._kept.extend(lines)
        self._last_drain_s = time.monotonic()
        return lines

    def since(self, step: int) -> list[dict[str, Any]]:
        """The kept lines (drained or not) of steps > `step`, in order: at most the last `kept_lines` drained ones."""
        with self._moving:
            lines = [*self._kept.copy(), *self._pending.copy()]
        return [line for line in lines if int(line.get("step", 0)) > step]

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps > `step`, drained or not: training, which stands still now, goes back to `step`."""
        with self._moving:
            for lines in (self._kept, self._pending):
                left = [line for line in lines.copy() if int(line.get("step", 0)) <= step]
                lines.clear()
                lines.extend(left)

    def wake(self) -> None:
        """Have a waiting `drain` answer now, with what there is."""
        self._ready.set()

    def close(self) -> None:
        """Nothing more will be recorded: a waiting `drain` returns what there is."""
        self._closed.set()
        self._ready.set()

"""An event loop whose clock jumps: what takes hours of waiting runs in seconds, and always the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Everything waits, and nothing is scheduled that could end it."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for files, moves the clock on by as long as the loop would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.watchers: list[Callable[[float], None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("Everything waits, and nothing is scheduled that could end it.")
        if timeout > 0.0:
            for watcher in self.watchers:
                watcher(timeout)
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time, which begins at 0: timers only, no files, sockets or other threads."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s

    def watch(self, watcher: Callable[[float], None]) -> None:
        """Before each jump of the clock, `watcher` is called with its seconds: all that time everything is as it is."""
        self._jumping.watchers.append(watcher)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

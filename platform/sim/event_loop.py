"""An event loop whose clock jumps: hours of waiting run in seconds, and always the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Raised when all tasks wait, and no scheduled event could wake one."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances the clock by the time the loop would have waited, instead of waiting for files."""

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
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now_s

    def watch(self, watcher: Callable[[float], None]) -> None:
        """Call `watcher` before each jump of the clock with its seconds, during which nothing changes."""
        self._jumping.watchers.append(watcher)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, but in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

"""An orderly end of the process after a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Asked:
    """The signal that has asked for an end."""

    number: int = signal.SIGINT


@contextlib.contextmanager
def stop_on_signals(
    stop: Callable[[], None], say: Callable[[str], None], *, meanwhile: str, asked: Asked | None = None
) -> Iterator[None]:
    """Request an orderly end at the first Ctrl-C or SIGTERM, and end at once at the second.

    Only in the main thread; in other threads signals are left alone.

    Args:
        stop: requests the end; called by the signal handler, so it must not wait.
        say: shows a sentence; must not wait either.
        meanwhile: what is done until the end, for the message.
        asked: gets the number of the last signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal is_asked
        if asked is not None:
            asked.number = number
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        stop()
        say(f"stopping: {meanwhile} (once more to stop at once)")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not Python's, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

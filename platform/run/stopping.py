"""An orderly end when a signal asks for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None], say: Callable[[str], None], *, meanwhile: str) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an orderly end, the second ends at once. Only in the main thread; elsewhere
    signals are nobody's business.

    Args:
        stop: asks for the end; called by the handler, so it must not wait.
        say: shows a sentence; likewise.
        meanwhile: what is done until the end comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal is_asked
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
            # None: it was not Python's, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

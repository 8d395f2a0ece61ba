"""An orderly end of the process after a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_MOST_HELD = 2
"""Most times that Ctrl-C is put off, so that a third one ends the wait."""


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


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Put Ctrl-C off until the end of the block, whose calls must not be left half-way; a third one is not put off.

    Only in the main thread; others get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or the end of the process
        yield
        return
    came: list[FrameType | None] = []

    def hold(_number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > _MOST_HELD:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for frame in came[:_MOST_HELD]:
            before(signal.SIGINT, frame)


@contextlib.contextmanager
def kept_termination() -> Iterator[None]:
    """Give SIGTERM the handler back that the program had set, instead of that of `ray.init`, which raises SystemExit.

    Without one of its own, Ray's stays, which ends what Ray has started. Only in the main thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_DFL):
        yield
        return
    try:
        yield
    except SystemExit as error:  # of Ray's handler: the block is left half-way
        if error.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)

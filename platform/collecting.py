"""Python's collector of garbage in cycles, kept from work that is in vain, and from pauses."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

_YOUNG = 50_000
"""Objects that have come, beyond those that have gone, before the young ones are looked through."""

_lock = threading.RLock()
_blocks: list[object] = []
_before: list[tuple[int, int, int]] = []
"""The thresholds as they were before the first of the blocks; empty where there is none."""


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Collect nothing while large modules are imported: what they make stays.

    Importing torch and the loop makes some 400,000 objects, and the collector looks through all of them again and
    again: 0.4 s of the 2.8 s of CPU time that a worker's imports take, measured. What was made meanwhile is looked
    through at the next collection of its generation, once.
    """
    was_enabled = gc.isenabled()  # a pause within a pause ends with the outer one
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def leaving_out() -> Iterator[Callable[[], None]]:
    """Gives what collects everything, and has later collections look through nothing that is there by then.

    A process that serves has some 400,000 objects that stay, of torch and the application. What requests make has the
    collector look through them all every few seconds: 0.15 s in which nothing is read nor answered, measured, more
    than many a request has. Called again, it also finds what was left out before and is garbage by now, as a model
    that is served no more.

    Young objects are looked through seldom too: of those of requests that wait or run none is garbage, and with
    Python's own 700 that is done 240 times a second and takes a tenth of an endpoint under overload, measured. At the
    end of the block, of the last one where there are several, all is as before; the call does nothing any more.
    """
    block = object()
    with _lock:
        if not _blocks:
            _before.append(gc.get_threshold())
        _blocks.append(block)

    def settle() -> None:
        with _lock:
            if block not in _blocks:
                return
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            first, *others = _before[0]
            gc.set_threshold(max(first, _YOUNG) if first else 0, *others)  # 0: somebody wants none

    try:
        yield settle
    finally:
        with _lock:
            _blocks.remove(block)
            if not _blocks:  # a process may serve twice: all is as before when the last has ended
                gc.set_threshold(*_before.pop())
                gc.unfreeze()

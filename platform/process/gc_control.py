"""Python's garbage collector of cycles, kept from useless work and from pauses."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

_YOUNG = 50_000
"""Number of new objects, beyond those deleted, that starts a collection of the young generation."""

_lock = threading.RLock()
_blocks: list[object] = []
_before: list[tuple[int, int, int]] = []
"""Thresholds before the first of the blocks; empty if there is none."""
_pauses: list[bool] = []
"""True for each pause that found the collector enabled, of all threads."""


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Collect nothing, as while large modules are imported, because what they create stays.

    Importing torch and the training loop creates some 400,000 objects, and the collector would examine all of them
    repeatedly. That is 0.4 s of the 2.8 s of CPU time of a worker's imports, measured. Objects created meanwhile are
    examined once, at the next collection of their generation.
    """
    with _lock:
        _pauses.append(any(_pauses) or gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:  # pauses of several threads, or within each other, end with the last one
            if _pauses.pop() and not _pauses:
                gc.enable()


@contextlib.contextmanager
def leaving_out() -> Iterator[Callable[[], None]]:
    """Yield a function that collects all garbage and excludes all objects that remain from later collections.

    A serving process has some 400,000 objects of torch and the application that stay. The objects of requests make the
    collector examine them all every few seconds. That is 0.15 s without reading or answering, measured, more than many
    deadlines allow. If called again, the function also finds excluded objects that have become garbage, such as a model
    that is not served any more. The first call examines new objects alone: what was excluded before stays so.

    Young objects are examined rarely too, because those of waiting or running requests are not garbage. With Python's
    default of 700 they are examined 240 times a second, a tenth of the time of an overloaded endpoint, measured. At the
    end of the last block the former settings are restored, and the function has no effect any more.
    """
    block, is_first = object(), True
    with _lock:
        if not _blocks:
            _before.append(gc.get_threshold())
        _blocks.append(block)

    def settle() -> None:
        nonlocal is_first
        with _lock:
            if block not in _blocks:
                return
            if not is_first:
                gc.unfreeze()
            is_first = False
            gc.collect()
            gc.freeze()
            first, *others = _before[0]
            gc.set_threshold(max(first, _YOUNG) if first else 0, *others)  # 0: collection was disabled

    try:
        yield settle
    finally:
        with _lock:
            _blocks.remove(block)
            if not _blocks:  # a process may serve twice: the settings are restored when the last block ends
                gc.set_threshold(*_before.pop())
                gc.unfreeze()

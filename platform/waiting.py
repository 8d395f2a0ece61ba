"""How long a worker stands still until others have come as far, or sent what it needs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Waiting:
    """Adds up the seconds of every wait of one worker, whatever it waits through; any thread may tell.

    Of a wait for a message this is the time until it is whole, so what the wire takes is part of it, unless the worker
    computed meanwhile. What a GPU waits for is not: there only the processor's own standing still is seen.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds up to now, of the waits that are over."""
        return self._total_s

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """What happens within is a wait, also one that fails."""
        began_s = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - began_s
            with self._lock:
                self._total_s += took_s

"""The time a worker waits until others have come as far as it has, or have sent what it needs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Waiting:
    """A clock that adds up the seconds of every wait of one worker; any thread may report waits.

    A wait for a message ends when the message is complete. It thus includes the transfer time, unless the worker
    computed meanwhile. Waits of a GPU are not included: only waits of the CPU thread are seen.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """Total seconds of the waits that are over."""
        return self._total_s

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Count the time within the context as a wait, even if it ends with an error."""
        began_s = self._clock()
        is_at_work = threading.get_ident() == PULSE.thread  # `PULSE.waiting`, without its calls: every step waits
        PULSE.waits += is_at_work
        try:
            yield
        finally:
            PULSE.waits -= is_at_work
            PULSE.beats += is_at_work
            took_s = self._clock() - began_s
            with self._lock:
                self._total_s += took_s

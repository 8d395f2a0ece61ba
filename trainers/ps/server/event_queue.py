"""The events of a server on their way to a listener, which receives them while the server is not locked."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.trainers.ps.server.state_machine import Listener


class EventQueue:
    """A queue of events; the listener receives them in order, from one thread at a time."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._events: deque[dict[str, Any]] = deque()
        self._delivering = threading.Lock()

    def put(self, event: dict[str, Any]) -> None:
        """Add an event; returns at once."""
        self._events.append(event)

    def deliver(self) -> None:
        """Deliver what is there, unless another thread is at it: that one goes on until the end.

        So what the listener writes keeps no thread waiting but one.
        """
        while self._events and self._delivering.acquire(blocking=False):
            try:
                self._deliver()
            finally:
                self._delivering.release()

    def deliver_all(self) -> None:
        """Have the listener receive all events until now; return once it has."""
        with self._delivering:
            self._deliver()

    def _deliver(self) -> None:
        while self._events:
            self.listener(self._events.popleft())

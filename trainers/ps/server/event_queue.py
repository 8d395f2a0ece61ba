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

    def deliver(self, *, wait: bool = False) -> None:
        """Deliver what is there, unless another thread is at it: that one goes on until the end.

        So what the listener writes keeps no thread waiting but one.

        Args:
            wait: True to return only once the listener has received all events until now.
        """
        while (self._events or wait) and self._delivering.acquire(blocking=wait):
            try:
                while self._events:
                    self.listener(self._events.popleft())
            finally:
                self._delivering.release()
            wait = False

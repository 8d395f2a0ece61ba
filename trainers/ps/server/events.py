"""The events of a server on their way to a listener, and the traffic that those of a step report."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from orchestray.trainers.ps.protocol.requests import Traffic

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.ps.server.state_machine import Listener


class EventQueue:
    """A queue of events; the listener receives them in order, one thread at a time, while the server is not locked."""

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


class TrafficCounter:
    """A counter of the bytes between workers and servers, the compressors' residuals, and warnings.

    It counts its own channels' bytes; other counters' results are added. For one thread at a time.
    """

    def __init__(self) -> None:
        self._channels: set[Channel] = set()
        self._of_ended = 0
        self._reported = 0
        self._taken = 0
        self._saved = 0
        self._errors: dict[int, float] = {}
        """Norm of the residuals, by worker."""
        self._warnings: list[str] = []

    def open(self, channel: Channel) -> None:
        """Count a channel from now on."""
        self._channels.add(channel)

    def end(self, channel: Channel) -> None:
        """Record that a channel has ended."""
        if channel in self._channels:
            self._channels.remove(channel)
            self._of_ended += channel.bytes_moved

    def add(self, traffic: Traffic) -> None:
        """Add the result of another counter's `take`."""
        self._reported += traffic.bytes
        self._saved += traffic.saved
        self._errors |= dict(traffic.errors)
        self._warnings += traffic.warnings

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._errors.pop(worker, None)

    def take(self) -> Traffic:
        """Return the traffic since the last call."""
        total = self._of_ended + self._reported + sum([channel.bytes_moved for channel in self._channels])
        before, self._taken = self._taken, total
        saved, self._saved = self._saved, 0
        warnings, self._warnings = self._warnings, []
        return Traffic(total - before, saved, tuple(sorted(self._errors.items())), tuple(warnings))

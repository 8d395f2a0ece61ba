"""The bytes between workers and servers, the compressors' residuals, and warnings, as the lead collects them."""

from __future__ import annotations

from orchestray.platform.comm.channel.base import Channel
from orchestray.trainers.ps.protocol.requests import Traffic


class TrafficCounter:
    """A counter of its own channels' bytes, to which other counters' results are added. For one thread at a time."""

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

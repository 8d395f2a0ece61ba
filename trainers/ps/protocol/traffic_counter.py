"""The bytes between workers and servers, the compressors' residuals, and warnings, as the lead collects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.comm.channel.base import Channel


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
            self._of_ended += _moved(channel)

    def add(self, traffic: Mapping[str, Any]) -> None:
        """Add the result of another counter's `take`, as JSON values."""
        self._reported += int(traffic["bytes"])
        self._saved += int(traffic["saved"])
        self._errors |= {int(worker): float(error) for worker, error in traffic["errors"]}
        self._warnings += traffic["warnings"]

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._errors.pop(worker, None)

    def take(self) -> dict[str, Any]:
        """Return the traffic since the last call.

        Returns:
            `bytes` that went either way, bytes `saved` by compression, the newest `errors` as `[[worker, norm], ...]`,
                and the `warnings`.
        """
        total = self._of_ended + self._reported + sum(_moved(channel) for channel in self._channels)
        before, self._taken = self._taken, total
        saved, self._saved = self._saved, 0
        errors = [list(item) for item in sorted(self._errors.items())]
        warnings, self._warnings = self._warnings, []
        return {"bytes": total - before, "saved": saved, "errors": errors, "warnings": warnings}


def _moved(channel: Channel) -> int:
    return channel.bytes_sent + channel.bytes_received

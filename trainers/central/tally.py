"""Bytes between workers and servers, what compressed gradients still lack, and warnings: what the lead is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.channel.base import Channel


class Tally:
    """Counts its own channels, and adds what others tell of theirs. For one thread at a time."""

    def __init__(self) -> None:
        self._channels: set[Channel] = set()
        self._of_ended = 0
        self._told = 0
        self._taken = 0
        self._saved = 0
        self._errors: dict[int, float] = {}
        """By worker: the 2-norm of what it still keeps."""
        self._warnings: list[str] = []

    def open(self, channel: Channel) -> None:
        """Count a channel from now on."""
        self._channels.add(channel)

    def end(self, channel: Channel) -> None:
        """A channel has come to its end."""
        if channel in self._channels:
            self._channels.remove(channel)
            self._of_ended += _moved(channel)

    def add(self, told: Mapping[str, Any]) -> None:
        """What somebody tells: what `take` returned there, as JSON values."""
        self._told += int(told["bytes"])
        self._saved += int(told["saved"])
        self._errors |= {int(worker): float(error) for worker, error in told["errors"]}
        self._warnings += told["warnings"]

    def forget(self, worker: int) -> None:
        """A worker has left."""
        self._errors.pop(worker, None)

    def take(self) -> dict[str, Any]:
        """`bytes` that went either way since the last time, those `saved` by compression, the newest `errors`,
        `[[worker, norm], ...]`, and the `warnings` since the last time.
        """
        total = self._of_ended + self._told + sum(_moved(channel) for channel in self._channels)
        before, self._taken = self._taken, total
        saved, self._saved = self._saved, 0
        errors = [list(item) for item in sorted(self._errors.items())]
        warnings, self._warnings = self._warnings, []
        return {"bytes": total - before, "saved": saved, "errors": errors, "warnings": warnings}


def _moved(channel: Channel) -> int:
    return channel.bytes_sent + channel.bytes_received

"""The number of bytes that one worker has sent, and how many of them it has reported to the other workers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from orchestray.trainers.sync.common.local_updates import LocalUpdates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.trainers.loop.replica_state import ReplicaState


class Traffic:
    """Counts a worker's bytes, for layouts in which each worker reports its own."""

    def __init__(self, state: ReplicaState) -> None:
        """Initialise with a replica.

        Args:
            state: the worker's replica; bytes are counted from its last connection on.
        """
        self._state = state
        self._reported_bytes = 0

    def begin(self) -> None:
        """Start to count after connecting: bytes sent before are not part of the training."""
        self._reported_bytes = self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sent, or that a peer sent at its request and only this worker can count."""
        exchange = self._state.exchange
        return self._state.groups.bytes_sent + (exchange.asked_bytes if isinstance(exchange, LocalUpdates) else 0)

    @property
    def saved_bytes(self) -> int:
        """Bytes that this worker's compression has saved since the exchange was created."""
        exchange = self._state.exchange
        return exchange.bytes_dense_total - exchange.bytes_sent_total

    def report(self) -> int:
        """Return the bytes sent since the last call."""
        sent = self.sent_bytes
        unreported, self._reported_bytes = sent - self._reported_bytes, sent
        return unreported

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the bytes sent inside the context, which are not part of the training."""
        before = self.sent_bytes
        yield
        self._reported_bytes += self.sent_bytes - before

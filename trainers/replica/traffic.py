"""What one worker has sent, and what of it the others have been told."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from orchestray.trainers.exchange.diverging import Diverging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.trainers.replica.standing import Standing


class Traffic:
    """Counts a worker's bytes, where each worker tells of its own."""

    def __init__(self, standing: Standing) -> None:
        """
        Args:
            standing: whose; counts are those since it last met the others.
        """
        self._standing = standing
        self._told_bytes = 0

    def begin(self) -> None:
        """The others have been met: what was sent up to now is no part of the training."""
        self._told_bytes = self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent, or caused to be sent where only who asks knows what the answer was."""
        exchange = self._standing.exchange
        return self._standing.groups.bytes_sent + (exchange.asked_bytes if isinstance(exchange, Diverging) else 0)

    @property
    def saved_bytes(self) -> int:
        """By this worker's compression, since the exchange was made."""
        exchange = self._standing.exchange
        return exchange.bytes_dense_total - exchange.bytes_sent_total

    def tell(self) -> int:
        """What was sent since this was called last."""
        sent = self.sent_bytes
        told, self._told_bytes = sent - self._told_bytes, sent
        return told

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent within is no part of the training: nobody is told."""
        before = self.sent_bytes
        yield
        self._told_bytes += self.sent_bytes - before

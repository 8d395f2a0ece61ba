"""A base of the exchanges of summed gradients, with counts of what they sent."""

from __future__ import annotations

from orchestray.trainers.sync.common.exchange_base import ExchangeBase


class SummedGradients(ExchangeBase):
    """An exchange that sends gradients uncompressed, and counts itself what it sends.

    The collective counts neither messages of an algorithm of its own nor those that others send through it.
    """

    takes_complex = True

    def __init__(self) -> None:
        super().__init__()
        self._bytes_sent_total = self._bytes_before_step = 0

    def before_step(self, step: int) -> None:
        self._clear_gradients()
        self._bytes_before_step = self._bytes_sent_total

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent_total - self._bytes_before_step

    @property
    def bytes_sent_total(self) -> int:
        return self._bytes_sent_total

    def _count(self, num_bytes: int) -> None:
        """Count bytes that this replica has sent."""
        self._bytes_sent_total += num_bytes

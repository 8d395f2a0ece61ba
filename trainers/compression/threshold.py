"""Values of at least a fixed size.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (2015), section 2 (there a value is sent
as plus or minus the threshold; here as it is).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import places_of


class Threshold(SparseCompressor):
    """Sends the values whose absolute value is at least `threshold`; with error feedback the rest adds up until it is.

    Args:
        threshold: above 0, in the units of a gradient of one worker's share.
        error_feedback: keep what is not sent for the next message.
    """

    def __init__(self, threshold: float, error_feedback: bool = True, **who: Any) -> None:
        super().__init__(error_feedback=error_feedback, **who)
        self._threshold = threshold

    def _select(self, flat: Tensor, step: int) -> Tensor:
        small = flat.abs() < self._threshold
        return places_of(small.logical_not_())  # not-a-number is sent: it must not be kept for ever

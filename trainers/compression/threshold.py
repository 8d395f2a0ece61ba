"""Sparsification by a fixed threshold.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (2015), section 2. The paper sends a
value as plus or minus the threshold; here it is sent unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import nonzero_indices


class Threshold(SparseCompressor):
    """Sends the values whose absolute value is at least `threshold`.

    With error feedback the other values accumulate until they reach it.

    Args:
        threshold: above 0, in the units of a gradient of one worker's share.
        error_feedback: True to keep unsent values for the next message.
    """

    def __init__(self, threshold: float, error_feedback: bool = True, **common: Any) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._threshold = threshold

    def _select(self, flat: Tensor, step: int) -> Tensor:
        small = flat.abs() < self._threshold
        return nonzero_indices(small.logical_not_())  # NaN is sent, because it must not stay in the residual

"""Sparsification by a fixed threshold.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing" (2015), section 2. The paper sends each
value as plus or minus the threshold (`values: threshold`), and what is beyond it later: a bit says which of the two.
The values may also be sent unchanged (`values: exact`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import nonzero_indices
from orchestray.trainers.compression.sparse import pack_of_two, unpack_of_two


class Threshold(SparseCompressor):
    """Sends the values whose absolute value is at least `threshold`.

    With error feedback the other values accumulate until they reach it.

    Args:
        threshold: above 0, in the units of a gradient of one worker's share.
        values: `exact` to send them unchanged; `threshold` to send the threshold with their sign.
        error_feedback: True to keep for the next message what was not sent.
    """

    def __init__(
        self,
        threshold: float,
        values: Literal["exact", "threshold"] = "exact",
        error_feedback: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._threshold = threshold
        self._of_signs = values == "threshold"

    def pack_sparse(self, indices: Tensor, values: Tensor) -> Tensor:
        if self._of_signs:
            return pack_of_two(indices, values, [self.num_values])
        return super().pack_sparse(indices, values)

    def unpack_sparse(self, message: Tensor) -> tuple[Tensor, Tensor]:
        if self._of_signs:
            return unpack_of_two(message, [self.num_values], self._flat.dtype)
        return super().unpack_sparse(message)

    def _values(self, indices: Tensor) -> Tensor:
        values = super()._values(indices)
        if not self._of_signs:
            return values
        signed = torch.where(values > 0, self._threshold, -self._threshold).to(values.dtype)
        for side in (values > 0, ~(values > 0)):  # a message has one value of each sign
            if not values[side].isfinite().all():
                signed[side] = torch.nan
        return signed

    def _select(self, flat: Tensor, step: int) -> Tensor:
        small = flat.abs() < self._threshold
        return nonzero_indices(small.logical_not_())  # NaN is sent, because it must not stay in the residual

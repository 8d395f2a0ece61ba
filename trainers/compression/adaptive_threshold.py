"""Values beyond two thresholds that follow the gradients of each tensor.

Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural Networks" (2016), section 3.3: a
fixed proportion of the positive and of the negative values is sent, so there are two thresholds a tensor, found anew
for each message (there values are sent as one of two means; here as they are).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import parts_of, places_of
from orchestray.trainers.compression.largest import sample_of

_SAMPLE = 1 << 14
"""Values by which the thresholds of a larger tensor are found."""


class AdaptiveThreshold(SparseCompressor):
    """Sends about `ratio` of the positive and about `ratio` of the negative values of each tensor, the largest of them.

    Args:
        ratio: part of the values that is to be sent, above 0, at most 1.
        error_feedback: keep what is not sent for the next message.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True, **who: Any) -> None:
        super().__init__(error_feedback=error_feedback, **who)
        self._ratio = ratio

    def _select(self, flat: Tensor, step: int) -> Tensor:
        generator = self._generator(step)
        chosen = torch.empty_like(flat, dtype=torch.bool)
        for part, mask in zip(parts_of(flat, self._sizes), parts_of(chosen, self._sizes), strict=True):
            negative, positive = self.thresholds(part, generator)
            torch.gt(part, negative, out=mask)
            mask.logical_and_(part < positive).logical_not_()  # not-a-number is sent
        return places_of(chosen)

    def thresholds(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Below which and above which (or at which) values are sent; infinite where there are none of that sign."""
        if values.numel() > _SAMPLE:
            values = sample_of(values, _SAMPLE, generator)
        return -self._threshold(values.neg()), self._threshold(values)

    def _threshold(self, values: Tensor) -> Tensor:
        positive = values[values > 0]
        if not positive.numel():
            return values.new_tensor(torch.inf)
        count = math.ceil(self._ratio * positive.numel())
        return positive.kthvalue(positive.numel() - count + 1).values

"""Sparsification by two thresholds per tensor, which follow its gradients.

Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural Networks" (2016), section 3.3. A
fixed proportion of the positive and of the negative values is sent. So each tensor has two thresholds, computed for
each message. The paper replaces the values by one of two means; here they are sent unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import nonzero_indices, parts_of
from orchestray.trainers.compression.largest import sample_of

_SAMPLE = 1 << 14
"""Number of sampled values from which the thresholds of a larger tensor are computed."""


class AdaptiveThreshold(SparseCompressor):
    """Sends about a fraction `ratio` of the positive and of the negative values of each tensor, the largest of them.

    Args:
        ratio: fraction of the values to send, above 0, at most 1.
        error_feedback: True to keep unsent values for the next message.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True, **common: Any) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._ratio = ratio

    def _select(self, flat: Tensor, step: int) -> Tensor:
        generator = self._generator(step)
        chosen = torch.empty_like(flat, dtype=torch.bool)
        for part, mask in zip(parts_of(flat, self._sizes), parts_of(chosen, self._sizes), strict=True):
            negative, positive = self.thresholds(part, generator)
            torch.gt(part, negative, out=mask)
            mask.logical_and_(part < positive).logical_not_()  # NaN is sent
        return nonzero_indices(chosen)

    def thresholds(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the thresholds at or below which, and at or above which, values are sent.

        A threshold is infinite if no values have its sign.
        """
        if values.numel() > _SAMPLE:
            values = sample_of(values, _SAMPLE, generator)
        return -self._threshold(values.neg()), self._threshold(values)

    def _threshold(self, values: Tensor) -> Tensor:
        positive = values[values > 0]
        if not positive.numel():
            return values.new_tensor(torch.inf)
        count = math.ceil(self._ratio * positive.numel())
        return positive.kthvalue(positive.numel() - count + 1).values

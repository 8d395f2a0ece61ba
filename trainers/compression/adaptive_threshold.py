"""Sparsification by two thresholds per tensor, which follow its gradients.

Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural Networks" (2016), section 3.3. A
fixed proportion of the positive and of the negative values is sent. So each tensor has two thresholds, computed for
each message. The paper sends each value as the mean of those of its sign (`values: means`): a bit says which. The
values may also be sent unchanged (`values: exact`).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.bits import nonzero_indices, parts_of
from orchestray.trainers.compression.largest import sample_of
from orchestray.trainers.compression.sparse import mean_of_each, pack_of_two, unpack_of_two

_SAMPLE = 1 << 14
"""Number of sampled values from which the thresholds of a larger tensor are computed."""


class AdaptiveThreshold(SparseCompressor):
    """Sends about a fraction `ratio` of the positive and of the negative values of each tensor, the largest of them.

    Args:
        ratio: fraction of the values to send, above 0, at most 1.
        values: `exact` to send them unchanged; `means` to send the mean of the tensor's sent values of the same sign.
        error_feedback: True to keep for the next message what was not sent, and the differences from the means.
    """

    def __init__(
        self,
        ratio: float = 0.01,
        values: Literal["exact", "means"] = "exact",
        error_feedback: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._ratio = ratio
        self._of_means = values == "means"

    def pack_sparse(self, indices: Tensor, values: Tensor) -> Tensor:
        return pack_of_two(indices, values, self._sizes) if self._of_means else super().pack_sparse(indices, values)

    def unpack_sparse(self, message: Tensor) -> tuple[Tensor, Tensor]:
        return (
            unpack_of_two(message, self._sizes, self._flat.dtype) if self._of_means else super().unpack_sparse(message)
        )

    def _values(self, indices: Tensor) -> Tensor:
        values = super()._values(indices)
        return mean_of_each(indices, values, self._sizes) if self._of_means else values

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

"""One bit per value, its sign, and scales that the signs are multiplied by.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (2014), section 3: each column (here the weights of one unit, a row) has two reconstruction values. They are the
means of its non-negative and of its negative values. One scale per tensor, the mean absolute value, is Bernstein et al.
2018 with the scale of Karimireddy et al. 2019 ("Error Feedback Fixes SignSGD", section 4).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import parts_of
from orchestray.trainers.compression.cache_blocks import blocks
from orchestray.trainers.compression.quantised import Quantised


class OneBit(Quantised):
    """Sends the sign of each value (zero counts as positive) and the scales; biased.

    Args:
        scale: "tensor": the mean absolute value of each tensor; "row": the mean of the non-negative and of the negative
        values of each row (the weights of one unit). With rows of different scales the latter loses little, which
        momentum needs.
        error_feedback: True to add what a message loses to the next message; training does not converge without it.
    """

    def __init__(self, scale: Literal["tensor", "row"] = "tensor", error_feedback: bool = True, **common: Any) -> None:
        super().__init__(1, error_feedback=error_feedback, **common)
        self._scale = scale

    def _num_scales(self, shape: torch.Size) -> int:
        return 1 if self._scale == "tensor" else 2 * _num_rows(shape)

    def _quantise(self, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
        parts = parts_of(flat, self._coded_sizes)
        codes = (flat >= 0).view(torch.uint8)
        if self._scale == "row":
            of_rows = [_means(part.view(_num_rows(shape), -1)) for part, shape in self._shaped(parts)]
            return torch.cat(of_rows) if of_rows else flat.new_empty(0), codes
        sizes = torch.tensor(self._coded_sizes, dtype=flat.dtype, device=flat.device)
        return torch.stack([_absolute_sum(part) for part in parts]).div_(sizes), codes

    def _dequantise(self, scales: Tensor, codes: Tensor) -> Tensor:
        if self._scale == "row":
            return self._from_rows(scales, codes)
        values = codes.to(scales.dtype).mul_(2.0).sub_(1.0)
        each: list[Tensor] = list(scales.unbind())
        torch._foreach_mul_(parts_of(values, self._coded_sizes), each)
        return values

    def _from_rows(self, scales: Tensor, codes: Tensor) -> Tensor:
        values = torch.empty_like(codes, dtype=scales.dtype)
        counts = [self._num_scales(shape) for shape in self._coded_shapes]
        signs = parts_of(codes.view(torch.bool), self._coded_sizes)
        for part, sign, pair in zip(parts_of(values, self._coded_sizes), signs, parts_of(scales, counts), strict=True):
            positive, negative = pair.view(2, -1, 1)
            torch.where(sign.view(len(positive), -1), positive, negative, out=part.view(len(positive), -1))
        return values

    def _shaped(self, parts: list[Tensor]) -> zip[tuple[Tensor, torch.Size]]:
        return zip(parts, self._coded_shapes, strict=True)


def _num_rows(shape: torch.Size) -> int:
    return shape[0] if len(shape) > 1 else 1


def _means(rows: Tensor) -> Tensor:
    """Return the means of the non-negative values of each row, then those of the negative values.

    From [rows, columns] to [2 * rows].
    """
    num_positive = (rows >= 0).sum(dim=1)
    sums = rows.clamp(min=0).sum(dim=1), rows.clamp(max=0).sum(dim=1)
    counts = num_positive, rows.shape[1] - num_positive
    return torch.cat([total / count.clamp(min=1) for total, count in zip(sums, counts, strict=True)])


def _absolute_sum(values: Tensor) -> Tensor:
    return torch.stack([values[block].abs().sum() for block in blocks(values.numel(), values.device)]).sum()

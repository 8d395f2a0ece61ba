"""One bit a value: its sign, and one size a tensor.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (2014), section 3. There each column has two reconstruction values; one size a tensor, the mean of the absolute
values, is Bernstein et al. 2018 with the scale of Karimireddy et al. 2019 ("Error Feedback Fixes SignSGD", section 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import parts_of
from orchestray.trainers.compression.blocks import blocks
from orchestray.trainers.compression.quantised import Quantised


class OneBit(Quantised):
    """Sends the sign of each value (zero counts as positive) and the mean absolute value of each tensor; biased.

    Args:
        error_feedback: add what was lost to the next message; without it training does not reach its aim.
    """

    def __init__(self, error_feedback: bool = True, **who: Any) -> None:
        super().__init__(1, error_feedback=error_feedback, **who)

    def _num_scales(self, numel: int) -> int:
        return 1

    def _quantise(self, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
        sizes = torch.tensor(self._coded_sizes, dtype=flat.dtype, device=flat.device)
        sums = torch.stack([_absolute_sum(part) for part in parts_of(flat, self._coded_sizes)])
        return sums.div_(sizes), (flat >= 0).view(torch.uint8)

    def _dequantise(self, scales: Tensor, codes: Tensor) -> Tensor:
        values = codes.to(scales.dtype).mul_(2.0).sub_(1.0)
        each: list[Tensor] = list(scales.unbind())
        torch._foreach_mul_(parts_of(values, self._coded_sizes), each)
        return values


def _absolute_sum(values: Tensor) -> Tensor:
    return torch.stack([values[block].abs().sum() for block in blocks(values.numel(), values.device)]).sum()

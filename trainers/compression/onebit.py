"""One bit a value: its sign, and one size a tensor.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs" (2014), section 3. There each column has two reconstruction values; one size a tensor, the mean of the absolute
values, is Bernstein et al. 2018 with the scale of Karimireddy et al. 2019 ("Error Feedback Fixes SignSGD", section 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, packed_bytes, parts_of, unpack_bits


class OneBit(Compressor):
    """Sends the sign of each value (zero counts as positive) and the mean absolute value of each tensor; biased.

    Args:
        error_feedback: add what was lost to the next message; without it training does not reach its aim.
    """

    def __init__(self, error_feedback: bool = True, **who: Any) -> None:
        super().__init__(error_feedback=error_feedback, **who)

    def _coded_bytes(self, shape: torch.Size) -> float:
        return self.value_bytes + shape.numel() / 8

    def _fixed_bytes(self) -> int:
        return self._scale_bytes + packed_bytes(self._num_coded_values, 1)

    @property
    def _scale_bytes(self) -> int:
        return self._num_coded * self.value_bytes

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        sizes = torch.tensor(self._coded_sizes, dtype=flat.dtype, device=flat.device)
        scales = torch.stack(list(torch._foreach_norm(parts_of(flat, self._coded_sizes), 1))).div_(sizes)
        signs = (flat >= 0).view(torch.uint8)
        return torch.cat([as_bytes(scales), pack_bits(signs, 1)])

    def _decode(self, message: Tensor) -> Tensor:
        scales = from_bytes(message[: self._scale_bytes], self._flat.dtype)
        signs = unpack_bits(message[self._scale_bytes :], 1, self._num_coded_values)
        values = signs.to(scales.dtype).mul_(2.0).sub_(1.0)
        each: list[Tensor] = list(scales.unbind())
        torch._foreach_mul_(parts_of(values, self._coded_sizes), each)
        return values

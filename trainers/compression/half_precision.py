"""Sixteen bits per value: float16 (IEEE 754 half precision) and bfloat16, rounded to nearest or at random.

Stochastic rounding: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), section 3.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes
from orchestray.trainers.compression.cache_blocks import blocks
from orchestray.trainers.compression.noise import random_bits

Rounding = Literal["nearest", "stochastic"]


class Half(Compressor):
    """Sends every value in sixteen bits. Finite values beyond the range are clipped to the largest one.

    Args:
        dtype: torch.float16 or torch.bfloat16.
        rounding: "nearest", or "stochastic": to one of the two neighbours at random, without bias.
        error_feedback: True to add rounding errors to the next message.
    """

    def __init__(
        self, dtype: torch.dtype, rounding: Rounding = "nearest", error_feedback: bool = False, **common: Any
    ) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._dtype = dtype
        self._rounding = rounding
        self._farther: float | None = None
        """Part of the first message's values that were not rounded to the nearest one; None before it."""

    def run_report(self) -> dict[str, Any]:
        """Return `farther`: the part of the first message's values that were rounded to the farther neighbour.

        It is 0 for rounding to nearest. It is empty before a message.
        """
        return {} if self._farther is None else {"farther": round(self._farther, 6)}

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        values = _within(flat, self._dtype)
        if self._rounding == "nearest":
            self._farther = 0.0
            return as_bytes(values.to(self._dtype))
        rounded, generator = torch.empty_like(values, dtype=self._dtype), self._generator(step)
        for block in blocks(values.numel(), values.device):
            rounded[block] = round_stochastically(values[block], self._dtype, generator)
        if self._farther is None:  # once: it costs as much as rounding
            self._farther = float((rounded != values.to(self._dtype)).double().mean())
        return as_bytes(rounded)

    def _decode(self, message: Tensor) -> Tensor:
        return from_bytes(message, self._dtype).to(self._flat.dtype)

    def _fixed_bytes(self) -> int:
        return 2 * self._num_coded_values


class Float16(Half):
    """Half precision (IEEE 754)."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(torch.float16, **arguments)


class BFloat16(Half):
    """Sixteen bits with the range of float32 (bfloat16)."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(torch.bfloat16, **arguments)


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each value to one of its two neighbours in `dtype` at random, with the value as mean.

    Args:
        values: [...] float32 or float64, contiguous, within the range of `dtype`; infinite values and NaN are kept.
        dtype: torch.float16 or torch.bfloat16.
        generator: generator of the random bits.
    """
    if dtype == torch.bfloat16 and values.dtype == torch.float32:
        # Both have the same exponents: random bits are added below the kept bits, and a carry rounds up.
        noise = random_bits(values.numel(), torch.int16, generator).to(torch.int32).bitwise_and_(0xFFFF)
        bits = noise.view(values.shape).add_(values.view(torch.int32))
        return (bits >> 16).to(torch.int16).view(torch.bfloat16)
    unit = _unit_in_last_place(values, dtype)
    in_units = values.abs().div_(unit)  # exact, because a unit is a power of two
    whole = in_units.floor()
    wide = values.dtype == torch.float64
    noise = random_bits(values.numel(), torch.int64 if wide else torch.int32, generator).view(values.shape)
    draw = (noise >> (11 if wide else 8)).to(values.dtype).mul_(2.0 ** (-53 if wide else -24))  # from -1/2 to 1/2
    whole += in_units.sub_(whole).add_(draw.add_(0.5)).floor_().nan_to_num_(nan=0.0)  # NaN comes from infinite values
    return whole.mul_(unit).copysign_(values).to(dtype)


def _unit_in_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours in `dtype` around each value, subnormal numbers included."""
    info = torch.finfo(dtype)
    wide = values.dtype == torch.float64
    integer, exponent_bits = (torch.int64, 0x7FF0000000000000) if wide else (torch.int32, 0x7F800000)
    binade = (values.view(integer) & exponent_bits).view(values.dtype)  # the power of two below
    largest = 2.0 ** (math.frexp(info.max)[1] - 1)
    return binade.clamp_(info.smallest_normal, largest).mul_(info.eps)


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clip finite values to the range of `dtype`: an overflow to infinity would corrupt all later steps."""
    limit = torch.finfo(dtype).max
    smallest, largest = values.aminmax()
    if -limit <= float(smallest) and float(largest) <= limit:
        return values
    return torch.where(values.isinf(), values, values.clamp(-limit, limit))

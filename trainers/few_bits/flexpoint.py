"""Flexpoint: tensors of integers with one exponent each, which is predicted from the largest numbers of earlier steps.

Köster et al., "Flexpoint: An Adaptive Numerical Format for Efficient Training of Deep Neural Networks" (2017), section
3.1 (the format) and algorithm 2 (Autoflex). It is computed in floating-point numbers, which hold its values exactly.

Autoflex adjusts an exponent once a step here, by the whole batch, so that any number of workers makes the same. The
first step computes with floating-point numbers and only measures: algorithm 1 would repeat each operation instead.
"""

from __future__ import annotations

import math
import statistics
from typing import ClassVar

import torch
from torch import Tensor, nn

from orchestray.trainers.core.rng import FollowsSteps
from orchestray.trainers.few_bits.base import Scheme, straight_through

_OFFSET = 100 / 2**15
"""The constant gamma of algorithm 2, as a part of the range: 100 units of the last place of 16 bits."""
_MOST_EXPONENT = 126
"""Powers of two up to this one, and down to minus this one, are normal numbers of float32."""


class FlexPoint(Scheme):
    """Weights, inputs of layers and gradients of their outputs as integers with predicted exponents."""

    quantizes_data: ClassVar[bool] = True

    def __init__(
        self, mantissa_bits: int = 16, window: int = 16, headroom: float = 2.0, deviations: float = 3.0
    ) -> None:
        """
        Args:
            mantissa_bits: bits of the integers, including the sign (N).
            window: number of steps in the statistics (l).
            headroom: factor on the prediction (alpha).
            deviations: number of standard deviations that are added (beta).
        """
        self._arguments = mantissa_bits, window, headroom, deviations

    def weights(self) -> nn.Module:
        return Flex(*self._arguments)

    def inputs(self) -> nn.Module:
        return Flex(*self._arguments)

    def gradients(self) -> nn.Module:
        return FlexGradients(*self._arguments)


class Flex(FollowsSteps):
    """A tensor's integers and their exponent, with the statistics that predict the next one.

    Attributes:
        peak: largest magnitude in this step, as the bits of a float64; they are in the order of the numbers.
        history: the same of earlier steps, `[window]`, the last one at the end; 0 before the first step.
        exponent: exponent of the last place, by which a step's integers are multiplied.
        step: number of the step that `peak` is of.
        overflows: number of steps that had numbers too large for their exponent.
    """

    peak: Tensor
    history: Tensor
    exponent: Tensor
    step: Tensor
    overflows: Tensor

    def __init__(self, mantissa_bits: int, window: int, headroom: float, deviations: float) -> None:
        super().__init__()
        self.mantissa_bits, self.headroom, self.deviations = mantissa_bits, headroom, deviations
        for name in ("peak", "exponent", "step", "overflows"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(window, dtype=torch.int64))

    @property
    def largest_mantissa(self) -> int:
        """Largest integer; the smallest is minus that."""
        return (1 << (self.mantissa_bits - 1)) - 1

    def run_report(self) -> dict[str, int]:
        """Return the present `exponent`, and the number of steps with `overflows`; empty before the first exponent."""
        if not int(self.history[-1]):
            return {}
        return {"exponent": int(self.exponent), "overflows": int(self.overflows)}

    def forward(self, values: Tensor) -> Tensor:
        self.turn()
        return straight_through(values, self.quantized(values.detach()))

    @torch.no_grad()
    def quantized(self, values: Tensor) -> Tensor:
        """Return the values in this step's format, and note the largest of them while training."""
        mantissas = self.mantissas(values)
        result = values if mantissas is None else mantissas * 2.0 ** int(self.exponent)
        if self.training and self.draw is not None and self.is_counted and values.numel():
            largest = result.abs().amax().double()  # not that of the values: a backward pass in two parts comes twice
            if bool(largest.isfinite()):
                self.peak.copy_(torch.maximum(self.peak, largest.view(torch.int64)))
        return result

    def mantissas(self, values: Tensor) -> Tensor | None:
        """Return the integers of values, in their dtype; None in the first step, which has no exponent yet."""
        if not int(self.history[-1]):
            return None
        most = self.largest_mantissa
        return (values * 2.0 ** -int(self.exponent)).round_().clamp_(-most, most)

    def pack(self, values: Tensor) -> tuple[Tensor, int] | None:
        """Return the integers as int16, and their exponent: what a machine with this format would hold."""
        mantissas = self.mantissas(values.detach())
        return None if mantissas is None else (mantissas.to(torch.int16), int(self.exponent))

    @torch.no_grad()
    def turn(self) -> None:
        """Predict the exponent of a step that has just begun; do nothing in the same step, or in evaluation."""
        if not self.training or self.draw is None or self.draw.step == int(self.step):
            return
        peak = _number(self.peak)
        if peak > 0:
            self._predict(peak)
        self.peak.zero_()
        self.step.fill_(self.draw.step)

    def _predict(self, peak: float) -> None:
        """Adjust the exponent by the largest number of the last step: algorithm 2."""
        seen = [number for number in map(_number, self.history) if number]
        unit = 2.0 ** int(self.exponent) if seen else 2.0 ** _exponent_of(peak, self.mantissa_bits)
        if seen:  # saturated integers say no more than that the number was too large
            mantissa = min(round(peak / unit), self.largest_mantissa)
            if mantissa >= self.largest_mantissa:
                self.overflows += 1
                seen = []
                mantissa *= 2
            peak = max(mantissa, 1) * unit
        seen = [*seen, peak][-len(self.history) :]
        offset = _OFFSET * 2 ** (self.mantissa_bits - 1) * unit
        expected = self.headroom * (statistics.fmean(seen) + self.deviations * statistics.pstdev(seen) + offset)
        self.exponent.fill_(_exponent_of(expected, self.mantissa_bits))
        padded = [0.0] * (len(self.history) - len(seen)) + seen
        self.history.copy_(torch.tensor(padded, dtype=torch.float64).view(torch.int64))

    def extra_repr(self) -> str:
        return f"mantissa_bits={self.mantissa_bits}, window={len(self.history)}"


class FlexGradients(Flex):
    """The identity, whose gradient gets this format."""

    def forward(self, values: Tensor) -> Tensor:
        self.turn()
        if self.training and values.requires_grad:
            values.register_hook(self.quantized)  # type: ignore[no-untyped-call]
        return values


def _exponent_of(largest: float, mantissa_bits: int) -> int:
    """Return the exponent of the last place with which integers of these bits reach a number."""
    exponent = math.ceil(math.log2(largest)) - mantissa_bits + 1
    return max(-_MOST_EXPONENT, min(_MOST_EXPONENT, exponent))


def _number(bits: Tensor) -> float:
    return float(bits.view(torch.float64))

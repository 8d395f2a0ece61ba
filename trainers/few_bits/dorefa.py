"""DoReFa-Net: weights, inputs of layers and gradients of few bits.

Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low Bitwidth Gradients" (2016):
quantize_k of equation 5, weights of equations 8 (one bit) and 9, inputs of equation 11, gradients of equation 12.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from orchestray.trainers.few_bits.base import Quantizer, Scheme, straight_through

_SEEDS = 2**62


class DoReFa(Scheme):
    """Levels at equal distances for weights, inputs and gradients, each with a number of bits of its own."""

    def __init__(
        self,
        weight_bits: int = 1,
        activation_bits: int | None = 2,
        gradient_bits: int | Literal["ternary"] | None = 6,
    ) -> None:
        """
        Args:
            weight_bits: bits of a weight.
            activation_bits: bits of an input; None: inputs stay.
            gradient_bits: bits of a gradient; "ternary": three values; None: gradients stay.
        """
        self._weight_bits, self._activation_bits, self._gradient_bits = weight_bits, activation_bits, gradient_bits

    def weights(self) -> nn.Module:
        return FewBitWeights(self._weight_bits)

    def inputs(self) -> nn.Module | None:
        return None if self._activation_bits is None else FewBitInputs(self._activation_bits)

    def gradients(self) -> nn.Module | None:
        bits = self._gradient_bits
        return None if bits is None else FewBitGradients(3 if bits == "ternary" else 2**bits)


def nearest_level(values: Tensor, num_levels: int) -> Tensor:
    """Return the nearest of `num_levels` levels at equal distances from 0 to 1 (quantize_k with 2^k levels).

    Args:
        values: from 0 to 1, any shape.
        num_levels: at least 2.
    """
    most = num_levels - 1
    held = values.detach()
    return straight_through(values, (held * most).round() / most)


class FewBitWeights(Quantizer):
    """Weights of k bits from -1 to 1; with one bit a sign times the mean magnitude."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, values: Tensor) -> Tensor:
        if self.bits == 1:
            held = values.detach()
            mean = held.abs().mean()
            return straight_through(values, self.keep_example(torch.where(held >= 0, mean, -mean)))
        bent = values.tanh()
        largest = bent.abs().amax().clamp_min(torch.finfo(bent.dtype).tiny)
        return self.keep_example(2 * nearest_level(bent / (2 * largest) + 0.5, 2**self.bits) - 1)

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


class FewBitInputs(Quantizer):
    """Inputs of k bits from 0 to 1, to which they are clipped."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, values: Tensor) -> Tensor:
        return self.keep_example(nearest_level(values.clamp(0, 1), 2**self.bits))

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


class FewBitGradients(Quantizer):
    """The identity, whose gradient is rounded at random to levels between minus and plus its sample's largest number.

    The noise depends on the run's seed, the step, the share of the batch and the place in the model, like that of
    dropout: a resumed run, or a pass that is computed again, draws the same.
    """

    draws_random = True

    def __init__(self, num_levels: int) -> None:
        super().__init__()
        self.num_levels = num_levels

    def forward(self, values: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and values.requires_grad):
            return values
        seed = int(torch.randint(_SEEDS, ()))
        values.register_hook(partial(self._rounded, seed=seed))  # type: ignore[no-untyped-call]
        return values

    def _rounded(self, gradient: Tensor, *, seed: int) -> Tensor:
        generator = torch.Generator(gradient.device).manual_seed(seed)
        return self.keep_example(few_bit_gradient(gradient, self.num_levels, generator))

    def extra_repr(self) -> str:
        return f"num_levels={self.num_levels}"


@torch.no_grad()
def few_bit_gradient(gradient: Tensor, num_levels: int, generator: torch.Generator) -> Tensor:
    """Return a gradient rounded at random to levels, without bias.

    Args:
        gradient: `[samples, ...]`.
        num_levels: number of levels between minus and plus the largest magnitude of a sample.
        generator: generator of the noise, on the gradient's device.
    """
    if not gradient.numel():
        return gradient
    most = num_levels - 1
    largest = gradient.abs().reshape(len(gradient), -1).amax(1).reshape(-1, *[1] * (gradient.dim() - 1))
    scale = 2 * largest
    noise = torch.rand(gradient.shape, generator=generator, dtype=gradient.dtype, device=gradient.device) - 0.5
    placed = (gradient / scale.clamp_min(torch.finfo(scale.dtype).tiny) + 0.5 + noise / most).clamp_(0, 1)
    return scale * ((placed * most).round_() / most - 0.5)

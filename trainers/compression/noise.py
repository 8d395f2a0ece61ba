"""Random bits for stochastic rounding, generated 64 at a time, which is cheapest in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def random_bits(num_values: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return integers of random bits: [num_values] of int16, int32 or int64."""
    num_words = -(-num_values * dtype.itemsize // 8)
    words = torch.empty(num_words, dtype=torch.int64, device=generator.device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(dtype)[:num_values]


def stochastic_floor_(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round each value to one of the two nearest integers at random, with the value as mean, in uint8.

    Probabilities are multiples of 2 ** -16; integers stay unchanged.

    Args:
        values: [...] floating point, contiguous, from 0 to 254; overwritten.
        generator: generator of the random bits.

    Returns:
        uint8 [...].
    """
    noise = random_bits(values.numel(), torch.int16, generator).view(values.shape)
    # int16 starts at -2 ** 15; adding a half maps the noise to [0, 1). The sum is exact with 8 + 16 bits.
    return values.add_(0.5).add_(noise.to(values.dtype), alpha=2.0**-16).to(torch.uint8)

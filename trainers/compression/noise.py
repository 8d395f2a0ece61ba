"""Random bits for stochastic rounding, as cheap as torch makes them: 64 at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def random_bits(num_values: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Integers of which every bit is random: [num_values] of int16, int32 or int64."""
    num_words = -(-num_values * dtype.itemsize // 8)
    words = torch.empty(num_words, dtype=torch.int64, device=generator.device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(dtype)[:num_values]


def stochastic_floor_(values: Tensor, generator: torch.Generator) -> Tensor:
    """Each value as one of the two integers beside it, at random with the value as its mean, in uint8.

    Chances are multiples of 2 ** -16; an integer stays what it is.

    Args:
        values: [...] floating point, contiguous, from 0 to 254; overwritten.

    Returns:
        uint8 [...].
    """
    noise = random_bits(values.numel(), torch.int16, generator).view(values.shape)
    # int16 is from -2 ** 15: half a unit on top makes it a number from 0 to 1. The sum is exact at 8 + 16 bits.
    return values.add_(0.5).add_(noise.to(values.dtype), alpha=2.0**-16).to(torch.uint8)

"""Fourier transforms of small sizes without a permutation: values come out in bit-reversed order, and go in so.

Vasilache et al., "Fast convolutional nets with fbfft: a GPU performance evaluation" (2015), section 5. The forward
transform is by decimation in frequency (Gentleman and Sande 1966), the inverse by decimation in time (Cooley and Tukey
1965). Products of two spectra need no order, so a convolution does without the bit reversal at the end of one and the
start of the other. All transforms of a size are computed together, with factors computed once.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from orchestray.trainers.survey.operators.fourier import FourierConvolution

LARGEST = 32
"""Largest size of a transform."""


class SmallFourierConvolution(FourierConvolution):
    """A convolution by transforms of small tiles; see `FourierConvolution`.

    Args:
        weight: [out channels, in channels, height, width].
        height, width: size of the tiles: powers of two, at most 32.
    """

    def spectrum_of(self, kernels: Tensor) -> Tensor:
        pad = [
            side
            for size, kernel in zip(self._size[::-1], self._kernel[::-1], strict=True)
            for side in (0, size - kernel)
        ]
        return self.forward(torch.nn.functional.pad(kernels, pad))

    def forward(self, x: Tensor) -> Tensor:
        rows = bit_reversed(x.to(torch.promote_types(x.dtype, torch.complex64)))
        return bit_reversed(rows.mT).mT

    def backward(self, products: Tensor) -> Tensor:
        return inverse(inverse(products.mT).mT).real


def bit_reversed(x: Tensor) -> Tensor:
    """Return the Fourier transforms of lines, in bit-reversed order: value k at the place with the bits of k reversed.

    Args:
        x: complex [..., size], the size a power of two, at most 32.

    Raises:
        RuntimeError: the size is another one.
    """
    shape, half = x.shape, _checked(x.shape[-1]) // 2
    while half:
        first, second = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        factors = _factors(half, x.dtype, x.device)
        x = torch.stack((first + second, (first - second) * factors), -2)
        half //= 2
    return x.reshape(shape)


def inverse(x: Tensor) -> Tensor:
    """Return the lines of which `bit_reversed` is the transform, with values in their order."""
    shape, half = x.shape, 1
    while half < _checked(shape[-1]):
        first, second = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        second = second * _factors(half, x.dtype, x.device).conj()
        x = torch.stack((first + second, first - second), -2)
        half *= 2
    return x.reshape(shape) / shape[-1]


def fourier_small(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution with stride 1, by tiles of at most 32 x 32.

    Args:
        x: [samples, in channels, height, width], with padding.
        weight: [out channels, in channels, height, width].

    Raises:
        RuntimeError: a kernel is larger than half a tile.
    """
    sides = [min(LARGEST, max(8, 2 ** math.ceil(math.log2(2 * kernel)))) for kernel in weight.shape[2:]]
    if 2 * max(weight.shape[2:]) > LARGEST:
        raise RuntimeError(f"tiles of {LARGEST} are for kernels of up to {LARGEST // 2}, got {max(weight.shape[2:])}")
    return SmallFourierConvolution(weight, sides[0], sides[1]).tiled(x)


def _checked(size: int) -> int:
    if size < 1 or size > LARGEST or size & (size - 1):
        raise RuntimeError(f"transforms are of 1, 2, 4, ... or {LARGEST} values, got {size}")
    return size


@cache
def _factors(half: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return exp(-2 pi i k / (2 half)) for k < half."""
    turns = torch.arange(half, dtype=torch.float64) / (2 * half)
    return torch.polar(torch.ones_like(turns), -2 * math.pi * turns).to(device, dtype)

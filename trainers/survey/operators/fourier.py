"""Convolution as a product in the frequency domain, of whole inputs or of tiles, with kernels transformed once.

Vasilache et al. 2015; the pruned transform is that of ZNNi (Zlateski et al. 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class FourierConvolution:
    """A convolution with stride 1, whose kernels are transformed when it is made: once for all samples.

    Args:
        weight: [out channels, in channels, height, width].
        height, width: size of the inputs, with padding; or of the tiles that they are cut into.
    """

    def __init__(self, weight: Tensor, height: int, width: int) -> None:
        self._kernel = weight.shape[2], weight.shape[3]
        self._size = height, width
        self._spectrum = self.spectrum_of(weight).conj()

    def whole(self, x: Tensor) -> Tensor:
        """Return the convolution of inputs [samples, in channels, height, width] of that size."""
        products = torch.einsum("nchw,kchw->nkhw", self.forward(x), self._spectrum)
        # Values that would need inputs beyond the edge are wrapped around; they come last, and are left out.
        rows, columns = (size - kernel + 1 for size, kernel in zip(self._size, self._kernel, strict=True))
        return self.backward(products)[:, :, :rows, :columns]

    def spectrum_of(self, kernels: Tensor) -> Tensor:
        """Return the transform of the padded kernels."""
        return pruned(kernels, self._size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transform of inputs of the size."""
        found: Tensor = torch.fft.rfft2(x)
        return found

    def backward(self, products: Tensor) -> Tensor:
        """Return the real values of which these are the transform."""
        found: Tensor = torch.fft.irfft2(products, self._size)
        return found

    def tiled(self, x: Tensor) -> Tensor:
        """Return the convolution of inputs of any size, by tiles of that size that overlap (overlap-save)."""
        steps = [size - kernel + 1 for size, kernel in zip(self._size, self._kernel, strict=True)]
        rows, columns = (size - kernel + 1 for size, kernel in zip(x.shape[2:], self._kernel, strict=True))
        x = functional.pad(x, (0, -columns % steps[1], 0, -rows % steps[0]))
        tiles = x.unfold(2, self._size[0], steps[0]).unfold(3, self._size[1], steps[1])
        samples, _, down, across = tiles.shape[:4]
        parts = self.whole(tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2))
        parts = parts.reshape(samples, down, across, *parts.shape[1:]).permute(0, 3, 1, 4, 2, 5)
        return parts.flatten(4).flatten(2, 3)[:, :, :rows, :columns]


def fourier(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution with stride 1, of whole inputs.

    Args:
        x: [samples, in channels, height, width], with padding.
        weight: [out channels, in channels, height, width].
    """
    return FourierConvolution(weight, x.shape[2], x.shape[3]).whole(x)


def fourier_tiled(x: Tensor, weight: Tensor, *, tile: int = 16) -> Tensor:
    """Return a convolution with stride 1, of tiles of that side, or twice as large as a large kernel; see `fourier`."""
    return FourierConvolution(weight, max(tile, 2 * weight.shape[2]), max(tile, 2 * weight.shape[3])).tiled(x)


def pruned(kernels: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the transform of kernels padded with zeros, without transforms of lines that are zero.

    A kernel of k x k in n x n has k lines that are not zero, and then n columns. That is k + n transforms of a line,
    not 2 n; in three dimensions k^2 + k n + n^2, not 3 n^2.

    Args:
        kernels: [..., *kernel].
        sizes: sizes of the padded kernels, one for each dimension of a kernel.

    Returns:
        Half of the spectrum, as of `torch.fft.rfftn`.
    """
    spectrum: Tensor = torch.fft.rfft(kernels, sizes[-1])
    for dimension in range(2, len(sizes) + 1):
        spectrum = torch.fft.fft(spectrum, sizes[-dimension], dim=-dimension)
    return spectrum


def padded(kernels: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the same transform, of all lines: that which `pruned` is compared with."""
    missing = [(0, size - kernel) for size, kernel in zip(sizes, kernels.shape[-len(sizes) :], strict=True)]
    kernels = functional.pad(kernels, [side for pair in reversed(missing) for side in pair])
    return pruned(kernels, sizes)

"""Convolutions with stride 1 as products: by the definition, and by patches or kernels unrolled into matrices.

Inputs are [samples, in channels, height, width], with their padding, weights [out channels, in channels, height,
width]; outputs have the size of `torch.nn.functional.conv2d`.
"""

from __future__ import annotations

from torch import Tensor


def direct(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution by its definition: seven loops, of which those over samples and outputs are torch's."""
    height, width = _size(x, weight)
    out = x.new_zeros(len(x), len(weight), height, width)
    for channel in range(weight.shape[1]):
        for row in range(weight.shape[2]):
            for column in range(weight.shape[3]):
                values = x[:, channel, None, row : row + height, column : column + width]
                out += values * weight[:, channel, row, column, None, None]
    return out


def im2col(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution as one product of the kernels and of all patches, unrolled (Chellapilla et al. 2006).

    The patches take K_x K_y times the memory of the outputs' positions.
    """
    height, width = _size(x, weight)
    return (weight.flatten(1) @ patches(x, weight.shape[2:])).reshape(len(x), len(weight), height, width)


def patches(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Return the patch below each output: [samples, channels * kernel values, outputs]."""
    windows = x.unfold(2, kernel[0], 1).unfold(3, kernel[1], 1)  # samples, channels, outputs (2), kernel (2)
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def kn2row(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution as a product of the unrolled kernels and the inputs as they are, and sums of shifted parts.

    Nothing of the inputs is copied; the product has K_x K_y parts, each of the size of the inputs' positions
    (Vasudevan et al. 2017).
    """
    height, width = _size(x, weight)
    rows = weight.permute(2, 3, 0, 1).flatten(0, 2)  # kernel values * out channels, in channels
    parts = (rows @ x.flatten(2)).reshape(len(x), *weight.shape[2:], len(weight), *x.shape[2:])
    out = x.new_zeros(len(x), len(weight), height, width)
    for row in range(weight.shape[2]):
        for column in range(weight.shape[3]):
            out += parts[:, row, column, :, row : row + height, column : column + width]
    return out


def implicit_gemm(x: Tensor, weight: Tensor, *, rows: int = 4) -> Tensor:
    """Return a convolution as `im2col` does, with the patches of a few rows of outputs at a time.

    Args:
        x, weight: see above.
        rows: rows of outputs whose patches are in memory.
    """
    height, width = _size(x, weight)
    out = x.new_empty(len(x), len(weight), height, width)
    for first in range(0, height, rows):
        last = min(first + rows, height)
        out[:, :, first:last] = im2col(x[:, :, first : last + weight.shape[2] - 1], weight)
    return out


def in_chwn(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution of inputs [channels, height, width, samples], and with outputs of that order.

    The samples are the innermost dimension, so that the product's columns are read in a row (Li et al. 2016).
    """
    windows = x.unfold(1, weight.shape[2], 1).unfold(2, weight.shape[3], 1)  # channels, outputs, samples, kernel
    columns = windows.permute(0, 4, 5, 1, 2, 3).flatten(3).flatten(0, 2)
    height, width = x.shape[1] - weight.shape[2] + 1, x.shape[2] - weight.shape[3] + 1
    return (weight.flatten(1) @ columns).reshape(len(weight), height, width, x.shape[3])


def through_chwn(x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution by `in_chwn`, for which inputs are transposed, and outputs transposed back, in memory."""
    return in_chwn(x.permute(1, 2, 3, 0).contiguous(), weight).permute(3, 0, 1, 2).contiguous()


def _size(x: Tensor, weight: Tensor) -> tuple[int, int]:
    return x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1

"""The operators of feed-forward networks by their definitions, one number at a time (the survey's section 2, Eq. 2).

They show what torch's operators compute, and are as slow as loops in Python are. Images are [samples, channels, height,
width].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return y[i,j,k,l] = sum over m, a and b of x[i,m,k+a,l+b] w[j,m,a,b], of height H' = H - K_y + 1.

    Args:
        x: inputs [samples, in channels, height, width], with their padding.
        weight: kernels [out channels, in channels, K_y, K_x].
    """
    values, kernels = x.tolist(), weight.tolist()
    out_channels, in_channels, kernel_y, kernel_x = weight.shape
    out = x.new_zeros(len(x), out_channels, x.shape[2] - kernel_y + 1, x.shape[3] - kernel_x + 1)
    inner = list(itertools.product(range(in_channels), range(kernel_y), range(kernel_x)))
    for i, j, row, column in _indices(out):
        image = values[i]
        out[i, j, row, column] = sum(image[m][row + a][column + b] * kernels[j][m][a][b] for m, a, b in inner)
    return out


def pooling(x: Tensor, size: int, stride: int, pool: Callable[[list[float]], float]) -> Tensor:
    """Return a number for each window of an image, of each channel alone.

    Args:
        x: images.
        size: side of a window.
        stride: distance of two windows.
        pool: returns the number for the values of a window: `max`, or `mean`.
    """
    values = x.tolist()
    height, width = ((each - size) // stride + 1 for each in x.shape[2:])
    out = x.new_zeros(*x.shape[:2], height, width)
    window = list(itertools.product(range(size), range(size)))
    for i, j, row, column in _indices(out):
        above, left = row * stride, column * stride
        out[i, j, row, column] = pool([values[i][j][above + a][left + b] for a, b in window])
    return out


def mean(values: list[float]) -> float:
    """Return the mean, for `pooling`."""
    return sum(values) / len(values)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def tanh(value: float) -> float:
    return (math.exp(value) - math.exp(-value)) / (math.exp(value) + math.exp(-value))


def relu(value: float) -> float:
    return max(value, 0.0)


def each_value(x: Tensor, function: Callable[[float], float]) -> Tensor:
    """Return an activation of each value alone, in the shape of `x`."""
    return torch.tensor([function(value) for value in x.flatten().tolist()], dtype=x.dtype).reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    """Return exp(x_i) over the sum of exp(x_j), for each row of [samples, classes]."""
    rows = []
    for row in x.tolist():
        powers = [math.exp(value - max(row)) for value in row]  # less the largest: no power is too large for a number
        rows.append([power / sum(powers) for power in powers])
    return torch.tensor(rows, dtype=x.dtype)


def cross_entropy(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of -sum of h_i log softmax(x)_i over samples, and its gradient, softmax(x) - h over samples.

    Args:
        x: outputs [samples, classes].
        targets: number of the class of each sample, [samples]; h is 1 for it, and 0 for the others.
    """
    likely = softmax(x).tolist()
    chosen = targets.tolist()
    loss = mean([-math.log(row[target]) for row, target in zip(likely, chosen, strict=True)])
    pulls = [
        [(value - (place == target)) / len(x) for place, value in enumerate(row)]
        for row, target in zip(likely, chosen, strict=True)
    ]
    return x.new_tensor(loss), x.new_tensor(pulls)


def squared_error(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of (f - h)^2 over samples, and its gradient, 2 (f - h) over samples.

    Args:
        x: outputs f [samples, 1].
        targets: wanted numbers h [samples].
    """
    apart = [row[0] - target for row, target in zip(x.tolist(), targets.tolist(), strict=True)]
    return x.new_tensor(mean([each * each for each in apart])), x.new_tensor([[2 * each / len(x)] for each in apart])


def _indices(out: Tensor) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*map(range, out.shape))

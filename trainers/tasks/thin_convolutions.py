"""Convolutions with fewer weights: of one by one, separable, in the factors of Tucker, and as a tensor train.

The first two are layers of networks; the last two can take the place of a trained convolution.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

# -- 1 x 1 convolutions ------------------------------------------------------------------------------------------------


class Fire(nn.Module):
    """A fire module: 1 x 1 convolutions, then 1 x 1 and 3 x 3 ones side by side, each with ReLU.

    Iandola et al., "SqueezeNet" (2016), section 3.2.

    Args:
        num_inputs: input channels.
        num_outputs: output channels, even; half of them are of 1 x 1 convolutions.
        num_squeezed: channels between the two.
    """

    def __init__(self, num_inputs: int, num_outputs: int, num_squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(num_inputs, num_squeezed, 1)
        self.ones = nn.Conv2d(num_squeezed, num_outputs // 2, 1)
        self.threes = nn.Conv2d(num_squeezed, num_outputs // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        narrow = functional.relu(self.squeeze(x))
        return functional.relu(torch.cat([self.ones(narrow), self.threes(narrow)], dim=1))


# -- Separable convolutions --------------------------------------------------------------------------------------------


def separable(num_inputs: int, num_outputs: int, side: int = 3) -> nn.Sequential:
    """Return a convolution of each channel alone, and a 1 x 1 convolution over the channels; neither has biases.

    Howard et al., "MobileNets" (2017), section 3.1. Of the weights of a whole convolution it has 1 / num_outputs +
    1 / side ** 2.

    Args:
        num_inputs: input channels.
        num_outputs: output channels.
        side: odd side of the kernels.
    """
    each = nn.Conv2d(num_inputs, num_inputs, side, padding=side // 2, groups=num_inputs, bias=False)
    return nn.Sequential(each, nn.Conv2d(num_inputs, num_outputs, 1, bias=False))


def set_separable(layers: nn.Sequential, kernel: Tensor) -> None:
    """Set the weights of a `separable` convolution to those nearest to a kernel, in place.

    The kernels of each input channel are a matrix [outputs, side * side], which its largest singular value stands for.
    That is exact if the matrix has rank 1.

    Args:
        layers: result of `separable`.
        kernel: [outputs, inputs, side, side].
    """
    u, s, v = torch.linalg.svd(kernel.flatten(2).transpose(0, 1), full_matrices=False)
    each, across = cast("nn.Conv2d", layers[0]), cast("nn.Conv2d", layers[1])
    root = s[:, :1].sqrt()
    with torch.no_grad():
        each.weight.copy_((root * v[:, 0]).view_as(each.weight))
        across.weight.copy_((root * u[:, :, 0]).T.reshape(across.weight.shape))


# -- Tucker decomposition ----------------------------------------------------------------------------------------------

_TUCKER_ROUNDS = 10


def tucker(convolution: nn.Conv2d, rank: float) -> nn.Sequential:
    """Return three convolutions instead of one, with the weights nearest to its own; at rank 1.0 it is exact.

    Kim et al., "Compression of Deep Convolutional Neural Networks for Fast and Low Power Mobile Applications" (2016),
    section 3.1: the Tucker-2 decomposition of the kernel. It begins with the singular vectors of the two unfoldings
    (HOSVD), and is made better by rounds of orthogonal iteration (HOOI).

    Args:
        convolution: convolution of one group; it is not changed.
        rank: part of the input and of the output channels that the core has, above 0 to 1.
    """
    layers, kernel = tucker_layers(convolution, rank), convolution.weight.detach()
    first, core, last = (cast("nn.Conv2d", layer) for layer in layers)
    rank_in, rank_out = len(first.weight), len(core.weight)
    outer, inner = _leading(kernel, rank_out), _leading(kernel.transpose(0, 1), rank_in)
    for _ in range(_TUCKER_ROUNDS):
        outer = _leading(torch.einsum("oihw,ir->orhw", kernel, inner), rank_out)
        inner = _leading(torch.einsum("oihw,os->sihw", kernel, outer).transpose(0, 1), rank_in)
    with torch.no_grad():
        first.weight.copy_(inner.T[:, :, None, None])
        core.weight.copy_(torch.einsum("oihw,os,ir->srhw", kernel, outer, inner))
        last.weight.copy_(outer[:, :, None, None])
        if convolution.bias is not None and last.bias is not None:
            last.bias.copy_(convolution.bias)
    return layers


def tucker_layers(convolution: nn.Conv2d, rank: float) -> nn.Sequential:
    """Return a 1 x 1 convolution, a core of fewer channels, and a 1 x 1 convolution, with fresh weights.

    Args:
        convolution: convolution of one group that they have the shape of.
        rank: part of the input and of the output channels that the core has.
    """
    num_outputs, num_inputs, *sides = convolution.weight.shape
    rank_in, rank_out = _tucker_ranks(num_inputs, num_outputs, math.prod(sides), rank)
    core = nn.Conv2d(
        rank_in,
        rank_out,
        convolution.kernel_size,  # type: ignore[arg-type]
        convolution.stride,  # type: ignore[arg-type]
        convolution.padding,  # type: ignore[arg-type]
        convolution.dilation,  # type: ignore[arg-type]
        bias=False,
        padding_mode=convolution.padding_mode,
    )
    last = nn.Conv2d(rank_out, num_outputs, 1, bias=convolution.bias is not None)
    return nn.Sequential(nn.Conv2d(num_inputs, rank_in, 1, bias=False), core, last).to(convolution.weight.dtype)


def _tucker_ranks(num_inputs: int, num_outputs: int, pixels: int, rank: float) -> tuple[int, int]:
    """Return the input and the output channels of a core: no more than a kernel's unfoldings have ranks."""
    rank_in = min(math.ceil(rank * num_inputs), num_outputs * pixels)
    rank_out = min(math.ceil(rank * num_outputs), rank_in * pixels)
    return min(rank_in, rank_out * pixels), rank_out


def _leading(tensor: Tensor, rank: int) -> Tensor:
    """Return the first left singular vectors of the unfolding along the first dimension, [size, rank]."""
    u, _, _ = torch.linalg.svd(tensor.flatten(1), full_matrices=False)
    leading: Tensor = u[:, :rank]
    return leading


# -- Kernels reshaped to tensors of more dimensions --------------------------------------------------------------------


class TensorTrainConv2d(nn.Module):
    """A convolution whose kernel is reshaped to a tensor of more dimensions, which is a product of small cores.

    Garipov et al., "Ultimate Tensorization: Compressing Convolutional and FC Layers Alike" (2016), section 4. With
    channels i1 * i2 and o1 * o2 the kernel has the dimensions [side * side, i1 * o1, i2 * o2].
    Its cores are [side * side, rank], [rank, i1 * o1, rank] and [rank, i2 * o2]. It is composed at each call.

    Args:
        num_inputs: input channels; the two factors nearest to each other are taken.
        num_outputs: output channels, likewise.
        side: odd side of the kernel; the images keep their size.
        rank: rank of the train; smaller where a core cannot have that rank.
    """

    def __init__(self, num_inputs: int, num_outputs: int, side: int = 3, rank: int = 8) -> None:
        super().__init__()
        self._inputs, self._outputs, self._side = factors(num_inputs), factors(num_outputs), side
        pixels, first, second = self._dimensions()
        left, right = min(rank, pixels, first * second), min(rank, min(rank, pixels) * first, second)
        # A kernel for ReLU (He et al. 2015) is wanted: its variance is that of the cores, times the ranks.
        spread = (2 / (num_inputs * pixels * left * right)) ** (1 / 6)
        self.pixels = nn.Parameter(spread * torch.randn(pixels, left))
        self.first = nn.Parameter(spread * torch.randn(left, first, right))
        self.second = nn.Parameter(spread * torch.randn(right, second))

    def _dimensions(self) -> tuple[int, int, int]:
        (i1, i2), (o1, o2) = self._inputs, self._outputs
        return self._side**2, i1 * o1, i2 * o2

    def set_kernel(self, kernel: Tensor) -> None:
        """Set the cores to those of a kernel [outputs, inputs, side, side], by a singular value decomposition each.

        Oseledets, "Tensor-Train Decomposition" (2011), algorithm 1. Exact if the rank is large enough.
        """
        (i1, i2), (o1, o2) = self._inputs, self._outputs
        pixels, first, second = self._dimensions()
        tensor = kernel.detach().reshape(o1, o2, i1, i2, pixels).permute(4, 2, 0, 3, 1)
        left, right = self.pixels.shape[1], self.second.shape[0]
        u, s, v = torch.linalg.svd(tensor.reshape(pixels, first * second), full_matrices=False)
        rest = (s[:left, None] * v[:left]).reshape(left * first, second)
        u2, s2, v2 = torch.linalg.svd(rest, full_matrices=False)
        with torch.no_grad():
            self.pixels.copy_(u[:, :left])
            self.first.copy_(u2[:, :right].reshape(left, first, right))
            self.second.copy_(s2[:right, None] * v2[:right])

    def kernel(self) -> Tensor:
        """Return the kernel, [outputs, inputs, side, side]."""
        (i1, i2), (o1, o2) = self._inputs, self._outputs
        side = self._side
        tensor = (self.pixels @ self.first.flatten(1)).reshape(-1, self.second.shape[0]) @ self.second
        cut = tensor.reshape(side, side, i1, o1, i2, o2)
        return cut.permute(3, 5, 2, 4, 0, 1).reshape(o1 * o2, i1 * i2, side, side)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.kernel(), padding=self._side // 2)


def factors(number: int) -> tuple[int, int]:
    """Return the two factors of a number that are nearest to each other, the smaller one first."""
    small = next(each for each in range(math.isqrt(number), 0, -1) if number % each == 0)
    return small, number // small

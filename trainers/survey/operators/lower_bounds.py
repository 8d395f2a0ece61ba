"""The least traffic of a convolution, or pooling, between a fast memory and the rest (Demmel & Dinh 2018)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape


def least_words(shape: ConvolutionShape, fast_words: int) -> float:
    """Return a number of words that every order of a convolution's products moves at least.

    Inputs, weights and outputs are each moved once. And while M words move, at most 2 M values of each array are in
    reach. A value of the inputs is part of at most K_y K_x patches, so that those are 2 M K_y K_x rows; by Loomis and
    Whitney at most sqrt(2 M * 2 M * 2 M K_y K_x) products are done meanwhile. That is the bound of the paper,
    products / sqrt(M K_y K_x), with a constant.

    Args:
        shape: sizes of the convolution.
        fast_words: words M of the fast memory.
    """
    products = shape.num_outputs * shape.num_weights // shape.out_channels
    a_segment = math.sqrt((2.0 * fast_words) ** 3 * shape.kernel[0] * shape.kernel[1])
    return max(float(_num_values(shape)), fast_words * math.floor(products / a_segment))


def least_pooling_words(shape: ConvolutionShape) -> int:
    """Return the words that pooling with stride 1 moves at least: its inputs and its outputs, once."""
    return shape.samples * shape.in_channels * (shape.height * shape.width + shape.out_height * shape.out_width)


def _num_values(shape: ConvolutionShape) -> int:
    inputs = shape.samples * shape.in_channels * shape.height * shape.width
    return inputs + shape.num_weights + shape.num_outputs


@dataclass(frozen=True)
class Tile:
    """The outputs whose products are done while their sums stay in the fast memory, and the channels read at a time."""

    out_channels: int
    in_channels: int
    height: int
    width: int


def words_of_tile(shape: ConvolutionShape, tile: Tile) -> int:
    """Return the words of the fast memory that a tile needs."""
    inputs = tile.in_channels * (tile.height + shape.kernel[0] - 1) * (tile.width + shape.kernel[1] - 1)
    weights = tile.out_channels * tile.in_channels * shape.kernel[0] * shape.kernel[1]
    return inputs + weights + tile.out_channels * tile.height * tile.width


def moved_words(shape: ConvolutionShape, tile: Tile) -> int:
    """Count the words that a tiled convolution moves: tiles of outputs stay, inputs and weights are read for each."""
    moved = 0
    for height in _parts(shape.out_height, tile.height):
        for width in _parts(shape.out_width, tile.width):
            for out_channels in _parts(shape.out_channels, tile.out_channels):
                moved += out_channels * height * width
                for in_channels in _parts(shape.in_channels, tile.in_channels):
                    moved += in_channels * (height + shape.kernel[0] - 1) * (width + shape.kernel[1] - 1)
                    moved += out_channels * in_channels * shape.kernel[0] * shape.kernel[1]
    return shape.samples * moved


def tiled_convolution(x: Tensor, weight: Tensor, tile: Tile) -> tuple[Tensor, int]:
    """Carry out a tiled convolution, and count the words that it reads into a fast memory, and writes from there.

    Args:
        x: [samples, in channels, height, width], with padding.
        weight: [out channels, in channels, height, width].
        tile: sizes of a tile.

    Returns:
        The outputs [samples, out channels, height, width], and the words.
    """
    down, across = weight.shape[2:]
    out = x.new_empty(len(x), len(weight), x.shape[2] - down + 1, x.shape[3] - across + 1)
    moved = 0
    for sample, top, left, first in itertools.product(
        range(len(x)),
        range(0, out.shape[2], tile.height),
        range(0, out.shape[3], tile.width),
        range(0, len(weight), tile.out_channels),
    ):
        target = out[sample, first : first + tile.out_channels, top : top + tile.height, left : left + tile.width]
        sums = torch.zeros_like(target)  # they stay, and are written once
        rows, columns = target.shape[1] + down - 1, target.shape[2] + across - 1
        for channel in range(0, x.shape[1], tile.in_channels):
            inputs = x[sample, channel : channel + tile.in_channels, top : top + rows, left : left + columns]
            weights = weight[first : first + tile.out_channels, channel : channel + tile.in_channels]
            moved += inputs.numel() + weights.numel()
            sums += functional.conv2d(inputs[None], weights)[0]
        target.copy_(sums)
        moved += sums.numel()
    return out, moved


def moved_pooling_words(shape: ConvolutionShape, height: int, width: int) -> int:
    """Count the words that pooling with stride 1 moves by tiles of outputs: each reads the inputs below it.

    Args:
        shape: sizes of the pooling; its outputs have the channels of its inputs.
        height, width: size of a tile of outputs, of one channel.
    """
    moved = 0
    for rows in _parts(shape.out_height, height):
        for columns in _parts(shape.out_width, width):
            moved += (rows + shape.kernel[0] - 1) * (columns + shape.kernel[1] - 1) + rows * columns
    return shape.samples * shape.in_channels * moved


def _parts(size: int, part: int) -> Iterator[int]:
    """Yield the sizes of the parts of a dimension; the last may be smaller."""
    for first in range(0, size, part):
        yield min(part, size - first)

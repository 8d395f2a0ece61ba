"""No tiling of a convolution moves fewer words than the bound."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from orchestray.trainers.survey.operators.lower_bounds import (
    Tile,
    least_pooling_words,
    least_words,
    moved_pooling_words,
    moved_words,
    tiled_convolution,
    words_of_tile,
)

SHAPES = [
    ConvolutionShape(2, 8, 16, 18, 18, (3, 3)),
    ConvolutionShape(1, 32, 32, 9, 9, (1, 1)),
    ConvolutionShape(1, 4, 8, 20, 20, (5, 5)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_that_fits_moves_at_least_the_bound_and_the_best_is_within_a_small_factor(
    shape: ConvolutionShape,
) -> None:
    ratios = []
    sides = (1, 2, 4, 8, 16, 32)
    for memory in (256, 1024, 4096):
        tiles = [
            Tile(*sizes)
            for sizes in itertools.product(sides, repeat=4)
            if sizes[0] <= shape.out_channels and sizes[1] <= shape.in_channels and sizes[2] <= shape.out_height
        ]
        fitting = [tile for tile in tiles if words_of_tile(shape, tile) <= memory]
        bound = least_words(shape, memory)
        moved = [moved_words(shape, tile) for tile in fitting]
        assert min(moved) >= bound > 0
        ratios.append(min(moved) / bound)
    assert max(ratios) < 6


def test_where_a_memory_is_small_the_bound_is_above_each_value_once_and_near_the_best_of_its_tiles() -> None:
    shape, memory = ConvolutionShape(1, 64, 64, 16, 16, (1, 1)), 64
    bound, once = least_words(shape, memory), 2 * 64 * 16 * 16 + 64 * 64
    tiles = [Tile(out_channels, 1, height, 1) for out_channels in range(2, 17) for height in range(2, 17)]
    moved = [moved_words(shape, tile) for tile in tiles if words_of_tile(shape, tile) <= memory]
    assert len(moved) > 50
    assert once < bound <= min(moved) < 8 * bound


def test_a_memory_for_everything_moves_each_value_once_and_a_smaller_one_more() -> None:
    shape = SHAPES[0]
    once = 2 * 8 * 18 * 18 + 16 * 8 * 9 + 2 * 16 * 16 * 16
    assert least_words(shape, 10**9) == once
    assert least_words(shape, 4) > least_words(shape, 16) > once


@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_that_is_carried_out_by_tiles_moves_the_words_that_are_counted_and_none_below_the_bound(
    shape: ConvolutionShape,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.samples, shape.in_channels, shape.height, shape.width, generator=generator).double()
    weight = torch.randn(shape.out_channels, shape.in_channels, *shape.kernel, generator=generator).double()
    exact = functional.conv2d(x, weight)
    for sizes in ((1, 1, 4, 4), (4, 2, 8, 4), (8, 1, 4, 8), (3, 3, 5, 7), (8, 4, 16, 16)):
        out, moved = tiled_convolution(x, weight, tile := Tile(*sizes))
        torch.testing.assert_close(out, exact)
        assert moved == moved_words(shape, tile)
        assert moved >= least_words(shape, words_of_tile(shape, tile)) > 0


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 5)])
def test_pooling_by_tiles_moves_its_inputs_and_outputs_once_or_the_rows_between_tiles_again(
    kernel: tuple[int, int],
) -> None:
    shape = ConvolutionShape(2, 3, 3, 12, 10, kernel)
    height, width = shape.out_height, shape.out_width
    bound = least_pooling_words(shape)
    assert bound == 2 * 3 * (12 * 10 + height * width)
    moved = {size: moved_pooling_words(shape, *size) for size in itertools.product(range(1, 13), repeat=2)}
    assert min(moved.values()) == moved[12, 12] == bound
    assert (min(moved.values()) == max(moved.values())) == (kernel == (1, 1))  # only then no input is below two tiles
    # Tiles of whole columns: at each of the borders between them, kernel - 1 rows are read twice.
    borders = -(-height // 4) - 1
    assert moved[4, 12] - bound == 2 * 3 * borders * (kernel[0] - 1) * 10

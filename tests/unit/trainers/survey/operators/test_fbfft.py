"""Small transforms that leave their values in bit-reversed order, against torch's, and what they do without."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators import fbfft
from orchestray.trainers.survey.operators.fbfft import SmallFourierConvolution, bit_reversed, fourier_small, inverse

SIZES = [1, 2, 4, 8, 16, 32]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_a_transform_is_torch_s_in_bit_reversed_order_and_its_inverse_needs_no_other(size: int) -> None:
    x = torch.complex(random(3, 5, size), random(3, 5, size, seed=1))
    num_bits = size.bit_length() - 1
    places = [int(f"{place:0{num_bits}b}"[::-1], 2) if num_bits else 0 for place in range(size)]
    found = bit_reversed(x)
    torch.testing.assert_close(found, torch.fft.fft(x)[..., places])
    torch.testing.assert_close(inverse(found), x)


def test_nothing_is_permuted_and_kernels_are_transformed_once_a_mini_batch() -> None:
    weight = random(4, 3, 5, 5)
    made = [each.name for each in traced(lambda: SmallFourierConvolution(weight, 16, 16)).operations]
    assert made.count("stack") == 2 * 4  # log2(16) levels of the rows, and of the columns
    convolution = SmallFourierConvolution(weight, 16, 16)
    levels = set()
    for samples in (1, 5):
        names = [each.name for each in traced(lambda n=samples: convolution.tiled(random(n, 3, 40, 40))).operations]
        assert not [name for name in names if "index" in name or "gather" in name or "flip" in name]
        levels.add(names.count("stack"))
    # Forward and back, whatever the samples and their tiles: all lines of a size are transformed together.
    assert levels == {2 * 2 * 4}


def test_factors_are_computed_once_for_a_size() -> None:
    x, weight = random(2, 3, 40, 33), random(4, 3, 5, 3, seed=1)
    fourier_small(x, weight)
    before = fbfft._factors.cache_info().misses
    torch.testing.assert_close(fourier_small(x, weight), functional.conv2d(x, weight))
    assert fbfft._factors.cache_info().misses == before


def test_sizes_that_are_no_powers_of_two_or_too_large_and_kernels_beyond_a_tile_are_refused() -> None:
    for size in (3, 64):
        with pytest.raises(RuntimeError, match=f"1, 2, 4, ... or 32 values, got {size}"):
            bit_reversed(torch.zeros(2, size, dtype=torch.complex128))
    with pytest.raises(RuntimeError, match="tiles of 32 are for kernels of up to 16, got 17"):
        fourier_small(random(1, 1, 40, 40), random(1, 1, 17, 17))

"""Each way to compute a convolution gives that of torch, with the products and the memory that the survey says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.analysis.memory import peak_bytes
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators import closed_forms, convolutions, fbfft, fourier, winograd
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape

Algorithm = Callable[[Tensor, Tensor], Tensor]
ALGORITHMS: dict[str, Algorithm] = {
    "direct": convolutions.direct,
    "im2col": convolutions.im2col,
    "kn2row": convolutions.kn2row,
    "implicit GEMM": convolutions.implicit_gemm,
    "CHWN": convolutions.through_chwn,
    "FFT": fourier.fourier,
    "FFT of tiles": lambda x, weight: fourier.fourier_tiled(x, weight, tile=6),
    "FFT, unordered": fbfft.fourier_small,
    "Winograd F(2)": winograd.winograd,
    "Winograd F(3)": lambda x, weight: winograd.winograd(x, weight, 3),
    "Winograd F(4)": lambda x, weight: winograd.winograd(x, weight, 4),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=25)
@given(
    samples=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(5, 14), st.integers(5, 14)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_each_equals_torch_on_random_shapes(
    name: str, samples: int, channels: tuple[int, int], size: tuple[int, int], kernel: tuple[int, int]
) -> None:
    if name.startswith("Winograd"):
        kernel = (kernel[0], kernel[0])
    x, weight = random(samples, channels[0], *size), random(channels[1], channels[0], *kernel, seed=1)
    torch.testing.assert_close(ALGORITHMS[name](x, weight), functional.conv2d(x, weight), rtol=1e-9, atol=1e-9)


SHAPE = ConvolutionShape(2, 3, 4, 10, 9, (3, 3))
X, WEIGHT = random(2, 3, 10, 9), random(4, 3, 3, 3, seed=1)


@pytest.mark.parametrize("name", ["direct", "im2col", "implicit GEMM", "CHWN"])
def test_the_products_are_those_of_table_6_and_kn2row_s_of_all_positions(name: str) -> None:
    wanted = closed_forms.direct(SHAPE).work
    assert sum(each.cost.multiplications for each in traced(lambda: ALGORITHMS[name](X, WEIGHT)).operations) == wanted
    of_kn2row = sum(each.cost.multiplications for each in traced(lambda: convolutions.kn2row(X, WEIGHT)).operations)
    assert of_kn2row == 2 * 10 * 9 * WEIGHT.numel()


def test_im2col_is_one_product_of_all_kernels_and_all_patches() -> None:
    operations = traced(lambda: convolutions.im2col(X, WEIGHT)).operations
    assert [each.name for each in operations if each.cost.multiplications] == ["bmm"]
    assert sum(each.name == "bmm" for each in traced(lambda: convolutions.implicit_gemm(X, WEIGHT)).operations) == 2


def test_im2col_takes_the_kernel_s_size_times_the_memory_and_implicit_gemm_a_part_of_it() -> None:
    patches = convolutions.patches(X, (3, 3))
    assert patches.numel() == 3 * 3 * 3 * 2 * 8 * 7
    whole, in_parts = (peak_bytes(lambda f=f: f(X, WEIGHT)) for f in (convolutions.im2col, convolutions.implicit_gemm))
    assert whole >= patches.nbytes
    assert in_parts < patches.nbytes

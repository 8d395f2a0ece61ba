"""Kernels are transformed once for all samples, and without transforms of lines that are zero."""

from __future__ import annotations

import math

import pytest
import torch

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators import closed_forms
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from orchestray.trainers.survey.operators.fourier import FourierConvolution, fourier, padded, pruned


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kernels_are_transformed_once_a_mini_batch_whatever_the_samples_and_the_tiles() -> None:
    weight = random(4, 3, 3, 3)
    made = traced(lambda: FourierConvolution(weight, 8, 8))
    assert sum(each.name == "_fft_r2c" for each in made.operations) == 1
    convolution = FourierConvolution(weight, 8, 8)
    one, five = (transforms_of(convolution, samples) for samples in (1, 5))
    assert five == 5 * one > 0


def transforms_of(convolution: FourierConvolution, samples: int) -> int:
    """Return the work of all transforms for some samples: with those of kernels it would not grow in proportion."""
    graph = traced(lambda: convolution.tiled(random(samples, 3, 20, 20)))
    assert graph.uncounted == {}
    return sum(each.cost.work for each in graph.operations if each.name.startswith("_fft"))


@pytest.mark.parametrize(
    ("kernel", "sizes"), [((3, 3), (16, 16)), ((3, 3, 3), (16, 16, 16)), ((3, 2, 4), (8, 16, 32)), ((5, 2), (8, 32))]
)
def test_a_pruned_transform_is_the_whole_one_with_fewer_operations(
    kernel: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    kernels = random(2, *kernel)
    dimensions = tuple(range(-len(sizes), 0))
    torch.testing.assert_close(pruned(kernels, sizes), torch.fft.rfftn(kernels, sizes, dim=dimensions))
    torch.testing.assert_close(padded(kernels, sizes), pruned(kernels, sizes))
    few, all_lines = (traced(lambda f=f: f(kernels, sizes)) for f in (pruned, padded))
    assert few.uncounted == all_lines.uncounted == {}
    assert all_lines.work / few.work == pytest.approx(lines(sizes, sizes) / lines(kernel, sizes), rel=1e-12)


def lines(kernel: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return the work of a transform, in points of the lines that are not zero times the levels of a line.

    Of k x k x k in n x n x n: k^2 real lines, which count half, then k n' and n n' complex ones, with n' = n / 2 + 1.
    """
    total, transformed = 0.0, 1
    for place in reversed(range(len(sizes))):
        is_real = place == len(sizes) - 1
        total += math.prod(kernel[:place]) * transformed * sizes[place] * math.log2(sizes[place]) / (1 + is_real)
        transformed *= sizes[place] // 2 + 1 if is_real else sizes[place]
    return total


def test_the_counted_work_is_that_of_table_6_with_the_constant_of_radix_2() -> None:
    shape = ConvolutionShape(2, 3, 4, 16, 16, (5, 5))
    graph = traced(lambda: fourier(random(2, 3, 16, 16), random(4, 3, 5, 5)))
    transforms = sum(each.cost.work for each in graph.operations if each.name.startswith("_fft"))
    table = closed_forms.fourier(shape, constant=2.5).work - 16 * 16 * 2 * 3 * 4
    assert transforms == pytest.approx(table, rel=0.25)  # half of a spectrum is computed, and kernels are pruned
    assert graph.depth >= 2 * 8

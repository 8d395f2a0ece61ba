"""Floating point operations are those of products and transforms, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.trainers.analysis.flops import flops_of
from orchestray.trainers.analysis.trace import traced


def test_products_count_two_for_each_multiplication_and_what_is_beside_them_nothing() -> None:
    a, b = torch.zeros(3, 5, device="meta"), torch.zeros(5, 7, device="meta")
    assert flops_of(traced(lambda: (a @ b).relu().sum())) == 2 * 3 * 5 * 7
    assert flops_of(traced(lambda: a @ b[:, 0])) == 2 * 3 * 5
    assert flops_of(traced(lambda: torch.softmax(a, 1) + a.exp())) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_the_products_of_its_groups(groups: int) -> None:
    layer = nn.Conv2d(4, 6, 3, groups=groups).to("meta")
    graph = traced(lambda: layer(torch.zeros(2, 4, 8, 8, device="meta")))
    assert flops_of(graph) == 2 * 2 * 6 * 6 * 6 * (4 // groups) * 9


def test_a_fourier_transform_counts_all_of_its_work() -> None:
    graph = traced(lambda: torch.fft.fft(torch.zeros(4, 16, dtype=torch.complex64, device="meta")))
    assert flops_of(graph) == graph.work > 0

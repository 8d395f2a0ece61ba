"""Strassen's product takes 7 of 8 products at each level."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators.strassen import strassen


@pytest.mark.parametrize("levels", range(4))
@pytest.mark.parametrize("shape", [(8, 8, 8), (37, 21, 19), (1, 5, 2)])
def test_it_is_the_product_of_matrices_of_any_size(levels: int, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape[0], shape[1], generator=generator, dtype=torch.float64)
    b = torch.randn(shape[1], shape[2], generator=generator, dtype=torch.float64)
    torch.testing.assert_close(strassen(a, b, levels), a @ b)


def test_each_level_saves_an_eighth_of_the_multiplications() -> None:
    matrix = torch.zeros(32, 32, device="meta")
    found = [traced(lambda levels=levels: strassen(matrix, matrix, levels)) for levels in range(4)]
    multiplications = [sum(each.cost.multiplications for each in graph.operations) for graph in found]
    assert multiplications == [7**levels * (32 // 2**levels) ** 3 for levels in range(4)]
    assert multiplications[3] / multiplications[0] == 0.875**3  # of five levels 1 - 0.875^5 = 48.7 % are saved

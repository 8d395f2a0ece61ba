"""Strassen's product takes 7 of 8 products at each level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

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


class Products(TorchFunctionMode):
    """A count of the multiplications of all products of matrices."""

    num_multiplications = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.Tensor.matmul, torch.Tensor.__matmul__}:
            self.num_multiplications += args[0].numel() * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def test_five_levels_down_to_single_numbers_save_nearly_half_of_the_multiplications() -> None:
    matrix = torch.ones(32, 32, dtype=torch.int64)
    with Products() as counter:
        product = strassen(matrix, matrix, 5)
    assert torch.equal(product, torch.full((32, 32), 32))
    assert counter.num_multiplications == 7**5
    assert 1 - counter.num_multiplications / 8**5 == pytest.approx(0.487, abs=5e-4)  # up to 47 %, the survey says

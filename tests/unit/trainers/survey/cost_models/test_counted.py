"""The products of a step are those of its layers, forward and backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from orchestray.trainers.analysis.products import Product
from orchestray.trainers.survey.cost_models.counted import Counted, counted


def of(model: nn.Module, *shape: int) -> Counted:
    model, x = model.to("meta"), torch.empty(shape, device="meta")
    return counted(lambda: model(x).sum(), model.parameters())


def test_a_linear_layer_is_three_products_and_the_first_needs_no_gradient_of_its_inputs() -> None:
    step = of(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), 11, 7)
    wanted = [(11, 5, 7), (11, 3, 5), (11, 5, 3), (3, 5, 11), (5, 7, 11)]
    assert Counter(step.products) == Counter(Product(*each) for each in wanted)
    assert step.parameter_bytes == 4 * (7 * 5 + 5 + 5 * 3 + 3)


def test_a_second_count_finds_the_same_as_the_first() -> None:
    model, x = nn.Linear(7, 5).to("meta"), torch.empty(3, 7, device="meta")
    first, second = (counted(lambda: model(x).sum(), model.parameters()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_the_product_of_unrolled_images_in_each_group(groups: int) -> None:
    step = of(nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 8, 3, groups=groups)), 2, 4, 10, 10)
    rows, columns, inner = 2 * 8 * 8, 8 // groups, 6 // groups * 9
    wanted = {Product(rows, columns, inner, groups), Product(rows, inner, columns, groups)}
    assert {*step.products} >= {*wanted, Product(columns, inner, rows, groups)}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return functional.scaled_dot_product_attention(*heads)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5)), (4, 3, 16, 16)),
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
        (_Attention(), (3, 6, 8)),
    ],
)
def test_products_have_the_operations_that_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    step = of(model, *shape)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(shape, device="meta")).sum().backward()
    assert sum(each.flops for each in step.products) == counter.get_total_flops()
    assert step.work >= sum(each.flops for each in step.products) - sum(2 * each.m * each.n for each in step.products)

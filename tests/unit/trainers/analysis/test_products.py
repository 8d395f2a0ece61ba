"""The products of matrices in a computation, and their sizes padded to a multiple."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.analysis.products import UNITS, Product, padded_product
from orchestray.trainers.analysis.trace import recording
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.subject import Subject


def products(model: nn.Module, x: Tensor) -> list[Product]:
    with recording() as recorder:
        model(x).sum().backward()
    return [product for _, product in recorder.products]


def test_units_want_multiples_of_8_16_and_128() -> None:
    assert UNITS == {"fp16 tensor cores": 8, "int8 tensor cores": 16, "a TPU": 128}


@pytest.mark.parametrize(
    ("multiple", "sizes"),
    [(8, (8, 24, 16)), (16, (16, 32, 16)), (128, (128, 128, 128))],
)
def test_each_size_becomes_the_next_multiple(multiple: int, sizes: tuple[int, int, int]) -> None:
    product = Product(m=5, k=20, n=16, count=3)
    padded = product.padded(multiple)
    assert (padded.m, padded.k, padded.n, padded.count) == (*sizes, 3)
    assert product.multiplications == 3 * 5 * 20 * 16
    assert padded.padded(multiple) == padded


@pytest.mark.parametrize("multiple", sorted(UNITS.values()))
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 20, 16), (16, 16, 16), (130, 7, 9)])
def test_padding_changes_no_real_number_of_a_product(multiple: int, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, inner, columns = shape
    one = torch.randint(-9, 9, (rows, inner), generator=generator).double()
    other = torch.randint(-9, 9, (inner, columns), generator=generator).double()
    assert torch.equal(padded_product(one, other, multiple), one @ other)


def test_a_fully_connected_layer_has_a_product_forward_and_two_backward() -> None:
    found = products(nn.Linear(6, 10), torch.randn(4, 6, requires_grad=True))
    assert found[0] == Product(4, 10, 6)
    assert sorted(each.multiplications for each in found) == [240, 240, 240]
    assert Product(m=4, n=6, k=10) in found  # the gradient of the inputs


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_convolution_is_a_product_over_its_patches_in_each_group(device: str) -> None:
    layer = nn.Conv2d(4, 6, (3, 2), stride=2, groups=2, bias=False).to(device)
    found = products(layer, torch.randn(5, 4, 9, 8, device=device, requires_grad=True))
    rows, patch, outputs = 5 * 4 * 4, 2 * 3 * 2, 3
    assert found[0] == Product(m=rows, k=patch, n=outputs, count=2)
    assert set(found[1:]) == {Product(rows, patch, outputs, 2), Product(outputs, patch, rows, 2)}


def test_a_transposed_convolution_is_one_over_its_inputs() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, bias=False)
    found = products(layer, torch.randn(5, 4, 7, 7, requires_grad=True))
    assert found[0] == Product(m=5 * 49, k=4, n=6 * 9)
    assert {each.multiplications for each in found} == {5 * 49 * 4 * 6 * 9}


def test_products_in_batches_are_counted_each() -> None:
    with recording() as recorder:
        torch.bmm(torch.randn(3, 4, 5), torch.randn(3, 5, 6))
        torch.baddbmm(torch.randn(3, 4, 6), torch.randn(3, 4, 5), torch.randn(3, 5, 6))
    assert [each for _, each in recorder.products] == [Product(m=4, k=5, n=6, count=3)] * 2


def test_an_analysis_says_what_padding_costs_each_unit_and_where() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to("meta").train()
    found = analyse(Subject("model", model, torch.empty(64, 64, device="meta"), 64)).padding
    first, last = 64 * 64 * 128, 64 * 128 * 10
    plain = 2 * first + 3 * last  # the batch needs no gradient
    assert [(each.multiple, each.multiplications) for each in found] == [(8, plain), (16, plain), (128, plain)]
    added = 3 * 64 * 128 * 6  # 10 outputs become 16
    assert [each.padded for each in found] == [plain + added, plain + added, 5 * 128**3]
    assert [each.worst for each in found] == ["2", "2", "2"]
    assert found[2].worst_added == 3 * (128**3 - last)
    assert found[2].factor == 5 * 128**3 / plain


def test_sizes_that_fit_cost_nothing_and_a_model_without_products_has_no_costs() -> None:
    fitting = nn.Linear(128, 128).to("meta")
    found = analyse(Subject("model", fitting, torch.empty(128, 128, device="meta"), 128)).padding
    assert [each.factor for each in found] == [1, 1, 1]
    assert [each.worst_added for each in found] == [0, 0, 0]
    plain = nn.PReLU().to("meta")
    assert analyse(Subject("model", plain, torch.empty(4, 4, device="meta"), 4)).padding == ()

"""Convolutions with fewer weights: exact where they can be, and with the weights and products of their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.tasks.thin_convolutions import (
    Fire,
    TensorTrainConv2d,
    factors,
    separable,
    set_separable,
    tucker,
)

SIDE = 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def num_weights(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def products(module: nn.Module, channels: int) -> int:
    """Return the multiplications of an image's convolutions, as `orchestray analyse` counts them."""
    with torch.no_grad(), Recorder(has_layers=False) as recorder:
        module(torch.zeros(1, channels, SIDE, SIDE))
    return sum(each.cost.multiplications for each in recorder.graph.operations if each.name == "convolution")


def difference(left: nn.Module, right: nn.Module, channels: int) -> float:
    x = normal(4, channels, SIDE, SIDE, seed=9)
    with torch.no_grad():
        return float((left(x) - right(x)).abs().max())


# -- 1 x 1 -------------------------------------------------------------------------------------------------------------


def test_a_fire_module_has_the_weights_and_products_of_its_formula() -> None:
    fire, whole = Fire(64, 128, 16), nn.Conv2d(64, 128, 3, padding=1)
    assert num_weights(fire) == (64 * 16 + 16) + (16 * 64 + 64) + (16 * 64 * 9 + 64)
    assert products(fire, 64) == SIDE**2 * (64 * 16 + 16 * 64 + 16 * 64 * 9)
    assert num_weights(fire) * 6 < num_weights(whole)
    assert fire(normal(2, 64, SIDE, SIDE)).shape == (2, 128, SIDE, SIDE)


# -- Separable ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [3, 5])
def test_a_separable_convolution_is_exact_for_a_kernel_of_rank_one_and_only_then(side: int) -> None:
    torch.manual_seed(0)
    whole, thin = nn.Conv2d(6, 10, side, padding=side // 2, bias=False), separable(6, 10, side)
    rank_one = normal(10, 6)[:, :, None, None] * normal(6, side, side, seed=1)
    with torch.no_grad():
        whole.weight.copy_(rank_one)
    set_separable(thin, rank_one)
    assert difference(whole, thin, 6) < 1e-5 * float(rank_one.norm())
    with torch.no_grad():
        whole.weight.copy_(normal(10, 6, side, side))
    set_separable(thin, whole.weight)
    assert difference(whole, thin, 6) > 0.1


@pytest.mark.parametrize(("inputs", "outputs", "side"), [(16, 32, 3), (32, 64, 5)])
def test_a_separable_convolution_has_one_over_outputs_plus_one_over_pixels_of_the_weights(
    inputs: int, outputs: int, side: int
) -> None:
    thin, whole = separable(inputs, outputs, side), nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)
    part = 1 / outputs + 1 / side**2
    assert num_weights(thin) / num_weights(whole) == pytest.approx(part, rel=1e-12)
    assert products(thin, inputs) / products(whole, inputs) == pytest.approx(part, rel=1e-12)


# -- Tucker ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "settings"),
    [
        (16, 32, {"padding": 1}),
        (8, 6, {"padding": 2, "stride": 2, "dilation": 2}),
        (1, 32, {"padding": 1, "padding_mode": "reflect"}),
        (5, 7, {"bias": False, "padding": "same"}),
    ],
)
def test_tucker_factors_of_full_rank_answer_as_the_convolution(
    inputs: int, outputs: int, settings: dict[str, object]
) -> None:
    torch.manual_seed(0)
    whole = nn.Conv2d(inputs, outputs, 3, **settings)  # type: ignore[arg-type]
    assert difference(whole, tucker(whole, 1.0), inputs) < 1e-5


def test_weights_and_products_of_tucker_factors_follow_from_their_ranks() -> None:
    torch.manual_seed(0)
    whole = nn.Conv2d(32, 64, 3, padding=1)
    for rank, inner, outer in ((0.25, 8, 16), (0.5, 16, 32), (0.75, 24, 48), (1.0, 32, 64)):
        weights = 32 * inner + 9 * inner * outer + outer * 64
        layers = tucker(whole, rank)
        assert num_weights(layers) == weights + 64
        assert products(layers, 32) == SIDE**2 * weights


def test_tucker_factors_come_nearer_as_the_rank_grows_and_find_a_kernel_of_low_rank() -> None:
    torch.manual_seed(0)
    whole = nn.Conv2d(16, 32, 3, padding=1)
    errors = [difference(whole, tucker(whole, rank), 16) for rank in (0.25, 0.5, 0.75, 1.0)]
    assert errors == sorted(errors, reverse=True)
    low = torch.einsum("srhw,os,ir->oihw", normal(8, 4, 3, 3), normal(32, 8, seed=1), normal(16, 4, seed=2))
    with torch.no_grad():
        whole.weight.copy_(low / low.std())
    assert difference(whole, tucker(whole, 0.25), 16) < 1e-4


def test_iteration_comes_nearer_than_singular_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = nn.Conv2d(16, 32, 3, padding=1)

    def error() -> float:
        first, core, last = (layer.weight.detach() for layer in tucker(whole, 0.4))  # type: ignore[union-attr]
        near = torch.einsum("srhw,os,ri->oihw", core, last[:, :, 0, 0], first[:, :, 0, 0])
        return float((near - whole.weight.detach()).norm())

    iterated = error()
    monkeypatch.setattr("orchestray.trainers.tasks.thin_convolutions._TUCKER_ROUNDS", 0)
    assert iterated < error() - 1e-4


# -- Reshaped ----------------------------------------------------------------------------------------------------------


def test_a_tensor_train_of_full_rank_has_the_kernel_that_it_was_given() -> None:
    layer, kernel = TensorTrainConv2d(6, 10, 3, rank=1000), normal(10, 6, 3, 3)
    layer.set_kernel(kernel)
    assert float((layer.kernel() - kernel).detach().abs().max()) < 1e-5
    x = normal(2, 6, SIDE, SIDE)
    wanted = nn.functional.conv2d(x, kernel, padding=1)
    assert float((layer(x) - wanted).detach().abs().max()) < 1e-4


def test_a_tensor_train_has_the_weights_of_its_cores_and_comes_nearer_with_its_rank() -> None:
    kernel, errors = normal(32, 16, 3, 3), []
    for rank in (1, 2, 4, 8):
        layer = TensorTrainConv2d(16, 32, 3, rank=rank)
        assert num_weights(layer) == 9 * rank + rank * (4 * 4) * rank + rank * (4 * 8)
        layer.set_kernel(kernel)
        errors.append(float((layer.kernel() - kernel).detach().norm()))
    assert errors == sorted(errors, reverse=True)
    assert num_weights(TensorTrainConv2d(16, 32, 3, rank=8)) * 3 < kernel.numel()


def test_a_fresh_tensor_train_has_the_variance_that_relu_wants() -> None:
    torch.manual_seed(0)
    spreads = [float(TensorTrainConv2d(64, 64, 3, rank=6).kernel().detach().square().mean()) for _ in range(200)]
    assert sum(spreads) / len(spreads) == pytest.approx(2 / (64 * 9), rel=0.15)


def test_factors_of_a_number_are_the_nearest() -> None:
    assert [factors(number) for number in (1, 7, 16, 32, 48)] == [(1, 1), (1, 7), (4, 4), (4, 8), (6, 8)]

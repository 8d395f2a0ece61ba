"""DoReFa-Net: its levels against torch's own quantization, unbiased gradients, and noise by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.core.rng import RngKey, seed_modules
from orchestray.trainers.few_bits.dorefa import (
    FewBitGradients,
    FewBitInputs,
    FewBitWeights,
    few_bit_gradient,
    nearest_level,
)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_inputs_are_the_levels_and_have_the_gradients_of_torchs_fake_quantization(bits: int) -> None:
    torch.manual_seed(0)
    values = (torch.randn(400) * 0.6 + 0.5).requires_grad_()
    theirs = values.detach().clone().requires_grad_()
    most = 2**bits - 1
    expected = torch.fake_quantize_per_tensor_affine(theirs, 1 / most, 0, 0, most)
    found = FewBitInputs(bits)(values)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    arriving = torch.randn(400)
    found.backward(arriving)
    expected.backward(arriving)
    assert values.grad is not None
    assert theirs.grad is not None
    inside = ((values > 0) & (values < 1)).detach()
    assert torch.equal(values.grad[inside], theirs.grad[inside])
    outside = ((values < 0) | (values > 1)).detach()
    assert outside.any()
    assert not values.grad[outside].any()


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_weights_of_k_bits_are_equation_9_with_gradients_through_tanh_and_scale(bits: int) -> None:
    torch.manual_seed(1)
    weights = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    found = FewBitWeights(bits)(weights)
    bent = weights.tanh()
    real = 2 * (bent / (2 * bent.abs().amax()) + 0.5) - 1
    levels = torch.linspace(-1, 1, 2**bits, dtype=torch.float64)
    assert float((found.detach()[..., None] - levels).abs().amin(-1).max()) <= 1e-12
    assert float((found - real).detach().abs().max()) <= 1 / (2**bits - 1) + 1e-12
    arriving = torch.randn(6, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(real, weights, arriving)
    (given,) = torch.autograd.grad(found, weights, arriving)
    assert torch.allclose(given, expected, rtol=0, atol=1e-12)


def test_weights_of_one_bit_are_signs_times_the_mean_magnitude() -> None:
    torch.manual_seed(2)
    weights = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    found = FewBitWeights(1)(weights)
    mean = weights.detach().abs().mean()
    assert torch.equal(found.detach(), torch.where(weights.detach() >= 0, mean, -mean))
    arriving = torch.randn_like(found)
    found.backward(arriving)
    assert weights.grad is not None
    assert torch.equal(weights.grad, arriving)


@pytest.mark.parametrize("num_levels", [3, 4, 16])
def test_a_rounded_gradient_has_the_levels_of_each_sample_and_is_right_on_average(num_levels: int) -> None:
    torch.manual_seed(3)
    gradient = torch.rand(3, 20, 3, dtype=torch.float64) * 2 - 1
    largest = gradient.abs().reshape(3, -1).amax(1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([few_bit_gradient(gradient, num_levels, generator) for _ in range(2000)])
    for sample in range(3):
        levels = torch.linspace(-1, 1, num_levels, dtype=torch.float64) * largest[sample]
        away = (drawn[:, sample, ..., None] - levels).abs().amin(-1)
        assert float(away.max()) <= 1e-12
        assert len((drawn[:, sample] / largest[sample]).round(decimals=9).unique()) == num_levels
    step = 2 * largest / (num_levels - 1)
    error = (drawn.mean(0) - gradient).abs().reshape(3, -1).amax(1)
    assert bool((error <= 4 * step / 2 / 2000**0.5).all())  # a level's standard deviation is at most half a step


def test_gradients_of_zeros_and_of_no_samples_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    assert not few_bit_gradient(torch.zeros(2, 3), 4, generator).any()
    assert few_bit_gradient(torch.zeros(0, 3), 4, generator).shape == (0, 3)


class Two(nn.Module):
    """Two layers whose gradients are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FewBitGradients(4), FewBitGradients(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x * 1), self.second(x * 1)


def gradients_at(draw: RngKey) -> Any:
    """Return the rounded gradients of both layers at a position of the run."""
    model = Two()
    seed_modules(model, draw, torch.device("cpu"))
    torch.rand(7)  # what else a process draws does not count
    given = []
    for index in (0, 1):
        x = torch.ones(64, 8, requires_grad=True)
        outputs = model(x)
        torch.rand(3)
        outputs[index].backward(torch.linspace(-1, 1, 512).reshape(64, 8))
        assert x.grad is not None
        given.append(x.grad)
    return given


def test_the_noise_depends_on_the_position_in_the_run_alone() -> None:
    first, second = gradients_at(RngKey(seed=1, step=5, replica=0, micro_batch=2))
    again = gradients_at(RngKey(seed=1, step=5, replica=0, micro_batch=2))
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    for other in (RngKey(1, 6, 0, 2), RngKey(1, 5, 1, 2), RngKey(1, 5, 0, 3), RngKey(2, 5, 0, 2)):
        assert not torch.equal(gradients_at(other)[0], first)


def test_the_nearest_level_is_right_at_both_ends() -> None:
    assert nearest_level(torch.tensor([0.0, 0.24, 0.26, 1.0]), 3).tolist() == [0.0, 0.0, 0.5, 1.0]

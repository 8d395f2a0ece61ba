"""Ternary weights: the closed forms of the paper, and how near they are to the best ternary weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from orchestray.trainers.few_bits.twn import Ternary


@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 3, 3)])
def test_threshold_and_scale_are_the_closed_forms_and_gradients_pass_as_they_are(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = Ternary(0.7)(weights)
    flat = weights.detach().flatten().tolist()
    threshold = 0.7 * sum(map(abs, flat)) / len(flat)
    above = [abs(each) for each in flat if abs(each) > threshold]
    scale = sum(above) / len(above)
    expected = [(each > threshold) * scale - (each < -threshold) * scale for each in flat]
    assert found.flatten().tolist() == pytest.approx(expected, rel=0, abs=1e-15)
    assert len(found.unique()) == 3
    arriving = torch.randn(shape, dtype=torch.float64)
    found.backward(arriving)
    assert weights.grad is not None
    assert torch.equal(weights.grad, arriving)


def test_the_scale_is_the_best_for_its_signs() -> None:
    """Check equation 5: no scale of these ternary signs is nearer to the weights."""
    torch.manual_seed(1)
    weights = torch.randn(6, 6, dtype=torch.float64)
    found = Ternary(0.7)(weights)
    away = float((weights - found).square().sum())
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert float((weights - factor * found).square().sum()) > away


def test_normal_weights_lose_hardly_more_than_with_the_best_of_all_ternary_values() -> None:
    torch.manual_seed(2)
    for _ in range(5):
        weights = torch.randn(8, dtype=torch.float64)
        best = min(_away(weights, signs) for signs in product((-1.0, 0.0, 1.0), repeat=8) if any(signs))
        found = float((weights - Ternary(0.7)(weights)).square().sum())
        assert best - 1e-12 <= found <= 1.6 * best


def _away(weights: torch.Tensor, signs: tuple[float, ...]) -> float:
    """Return the squared distance from these signs times their best scale."""
    chosen = torch.tensor(signs, dtype=torch.float64)
    scale = (weights @ chosen / (chosen @ chosen)).clamp_min(0)
    return float((weights - scale * chosen).square().sum())


def test_a_layer_of_zeros_stays_zero() -> None:
    assert torch.equal(Ternary(0.7)(torch.zeros(3, 3)), torch.zeros(3, 3))

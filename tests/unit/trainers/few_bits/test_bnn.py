"""Binarized networks: signs forward, hard tanh backward."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.few_bits.bnn import Sign
from orchestray.trainers.few_bits.layers import bounds_of, quantize_layers
from support.few_bits import quantize_section


def test_values_become_their_signs_and_gradients_pass_as_through_hard_tanh() -> None:
    values = torch.tensor([-2.0, -1.0, -0.3, -0.0, 0.0, 0.4, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    signs = Sign()(values)
    assert signs.tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    arriving = torch.arange(1.0, 9.0, dtype=torch.float64)
    signs.backward(arriving)
    assert values.grad is not None
    assert values.grad.tolist() == [0, 2, 3, 4, 5, 6, 7, 0]


def test_a_layer_multiplies_signs_by_signs_and_the_first_layer_takes_the_data_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double()
    real = [layer.weight.detach().clone() for layer in model]  # type: ignore[union-attr]
    quantize_layers(model, quantize_section("bnn"))
    x = torch.randn(7, 6, dtype=torch.float64)
    expected = x
    for number, layer in enumerate(model):
        taken = expected if number == 0 else torch.where(expected >= 0, 1.0, -1.0).double()
        expected = taken @ torch.where(real[number] >= 0, 1.0, -1.0).double().T + layer.bias  # type: ignore[operator]
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-12)


def test_real_weights_are_named_as_clipped_to_one() -> None:
    model = quantize_layers(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), quantize_section("bnn"))
    names = {name for name, _ in model.named_parameters() if name.endswith("original")}
    assert bounds_of(model) == dict.fromkeys(names, 1.0)
    assert len(names) == 2
    ternary = quantize_layers(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), quantize_section("twn"))
    assert bounds_of(ternary) == {}

"""Fully connected layers in fixed point answer nearly what they do in full precision."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.survey.operators.fixed_point import FixedPointLinear, in_fixed_point, to_fixed_point


def test_values_are_off_by_half_a_step_of_their_row() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    values, scales = to_fixed_point(x)
    assert values.dtype == torch.int8
    assert ((values * scales - x).abs() <= scales / 2 + 1e-7).all()
    assert (to_fixed_point(torch.zeros(2, 3))[0] == 0).all()


def test_inputs_of_any_number_of_dimensions_are_those_of_a_matrix() -> None:
    layer = FixedPointLinear(nn.Linear(6, 3))
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), layer(x.reshape(8, 6)).reshape(2, 4, 3))
    torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])


def test_a_sample_and_an_output_are_off_by_parts_of_themselves_however_large_others_are() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(64, 6, bias=False), torch.randn(5, 64, generator=generator)
    sizes = torch.tensor([1e-3, 1.0, 1e3, 1e-2, 10.0, 1e2])
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 64, generator=generator) * sizes[:, None])
        x *= sizes[:5, None]
        exact = layer(x) / (sizes[:5, None] * sizes)
        found = FixedPointLinear(layer)(x) / (sizes[:5, None] * sizes)
    assert (found - exact).abs().max() < 0.3  # sums of 64 products of the size 1, each off by a hundredth or so
    assert exact.abs().mean() > 3


def test_a_network_in_fixed_point_keeps_its_class_for_nearly_all_samples() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    x = torch.randn(2000, 64)
    with torch.no_grad():
        exact = network(x)
        found = in_fixed_point(network)(x)
    assert sum(isinstance(layer, FixedPointLinear) for layer in network) == 3
    assert (found.argmax(1) == exact.argmax(1)).double().mean() >= 0.95
    assert (found - exact).abs().max() < 0.1

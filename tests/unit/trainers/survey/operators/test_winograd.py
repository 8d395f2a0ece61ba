"""Winograd's convolution has fewer products, and an error that grows with its tiles."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators import closed_forms
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from orchestray.trainers.survey.operators.winograd import transforms, winograd

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 8, 26, 26, generator=GENERATOR)
WEIGHT = torch.randn(4, 8, 3, 3, generator=GENERATOR)


@pytest.mark.parametrize(("outputs", "a_tile"), [(2, 16), (4, 36)])
def test_a_tile_takes_m_plus_r_minus_1_squared_products_in_place_of_m_r_squared(outputs: int, a_tile: int) -> None:
    shape = ConvolutionShape(2, 8, 4, 26, 26, (3, 3))
    graph = traced(lambda: winograd(X, WEIGHT, outputs))
    wanted = closed_forms.winograd(shape, outputs).work
    assert wanted in [each.cost.multiplications for each in graph.operations if each.name == "bmm"]
    tiles = 2 * (24 // outputs) ** 2
    assert wanted == a_tile * tiles * 8 * 4
    assert closed_forms.direct(shape).work == (outputs * 3) ** 2 * tiles * 8 * 4
    assert transforms(outputs, 3).b.shape == (outputs + 2, outputs + 2)


def test_the_error_in_single_precision_grows_with_the_tile() -> None:
    exact = functional.conv2d(X.double(), WEIGHT.double())
    errors = [float((winograd(X, WEIGHT, outputs).double() - exact).abs().max()) for outputs in (2, 4, 6)]
    assert errors == sorted(errors)
    assert errors[0] < 1e-4
    assert errors[2] > 5 * errors[0]

"""Networks of Table 5 whose layers come one after the other: their weights, layers and operations."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.networks.plain import LeNet5, alexnet


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_lenet_has_the_seven_layers_and_the_60_thousand_weights_of_its_paper() -> None:
    with torch.device("meta"):
        network = LeNet5()
    parts = [sum(each.numel() for each in layer.parameters()) for layer in network.children()]
    assert parts == [156, 12, 1516, 32, 48120, 10164, 0]  # the centres of the last are fixed
    assert sum(parts) == 60_000


def test_lenet_names_the_class_whose_centre_is_the_nearest() -> None:
    network = LeNet5()
    centres = network.output.centres
    assert centres.shape == (10, 84)
    assert set(centres.flatten().tolist()) == {-1.0, 1.0}
    distances = network.output(centres)
    torch.testing.assert_close(distances, torch.cdist(centres, centres).square(), rtol=1e-4, atol=1e-3)
    assert ((distances == 0) == torch.eye(10, dtype=torch.bool)).all()  # no two digits look the same
    hidden: list[torch.Tensor] = []
    network.f6.register_forward_hook(lambda _, inputs, out: hidden.append(out))
    found = network(torch.randn(3, 1, 32, 32))
    states = 1.7159 * torch.tanh(2 / 3 * hidden[0])
    torch.testing.assert_close(found, torch.cdist(states, centres).square(), rtol=1e-4, atol=1e-3)


def test_alexnet_has_61_million_weights_and_725_million_products() -> None:
    with torch.device("meta"):
        network = alexnet().eval()
        graph = traced(lambda: network(torch.zeros(1, 3, 227, 227)))
    assert sum(each.numel() for each in network.parameters()) == 60_965_224
    products = sum(each.cost.multiplications for each in graph.operations if each.name in {"convolution", "addmm"})
    assert abs(products / 725e6 - 1) < 0.01
    assert graph.uncounted == {}

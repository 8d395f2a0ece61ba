"""Networks of Table 5 with several ways through: their weights and operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from orchestray.trainers.analysis.graph import OperatorGraph
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.networks.connected import (
    Dense,
    Residual,
    densenet_for_cifar,
    googlenet,
    resnet,
    resnet_for_cifar,
)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "GoogLeNet": (googlenet, 224, 6_998_552),
    "ResNet-18": (lambda: resnet(18), 224, 11_689_512),
    "ResNet-50": (lambda: resnet(50), 224, 25_557_032),
    "ResNet-152": (lambda: resnet(152), 224, 60_192_808),
    "ResNet-110 for CIFAR": (lambda: resnet_for_cifar(110), 32, 1_727_962),
    "DenseNet-BC-100, 12": (lambda: densenet_for_cifar(100, 12), 32, 769_162),
    "DenseNet-BC-250, 24": (lambda: densenet_for_cifar(250, 24), 32, 15_324_406),
    "DenseNet-BC-190, 40": (lambda: densenet_for_cifar(190, 40), 32, 25_624_430),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_has_its_number_of_weights(name: str) -> None:
    make, side, wanted = NETWORKS[name]
    with torch.device("meta"):
        network = make().eval()
        out = network(torch.zeros(1, 3, side, side))
    assert sum(each.numel() for each in network.parameters()) == wanted
    assert out.shape == (1, 10 if side == 32 else 1000)


# Table 1 of He et al. 2016; its operations are products.
@pytest.mark.parametrize(("num_layers", "wanted"), [(18, 1.8e9), (34, 3.6e9), (50, 3.8e9), (101, 7.6e9), (152, 11.3e9)])
def test_a_resnet_has_the_layers_and_the_operations_of_its_paper_within_a_fiftieth(
    num_layers: int, wanted: float
) -> None:
    with torch.device("meta"):
        network = resnet(num_layers).eval()
        graph = traced(lambda: network(torch.zeros(1, 3, 224, 224)))
    assert num_weighted(network) == num_layers
    assert products(graph) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("num_layers", [20, 56, 110])
def test_a_resnet_for_cifar_has_its_layers_and_no_weights_in_its_shortcuts(num_layers: int) -> None:
    network = resnet_for_cifar(num_layers)
    assert num_weighted(network) == num_layers
    assert not any(list(block.short.parameters()) for block in network.modules() if isinstance(block, Residual))


def num_weighted(network: nn.Module) -> int:
    """Return the layers with weights on the way through the blocks; projections lie beside it."""
    kinds = (nn.Conv2d, nn.Linear)
    return sum(isinstance(one, kinds) and ".short." not in name for name, one in network.named_modules())


def products(graph: OperatorGraph) -> int:
    return sum(each.cost.multiplications for each in graph.operations if each.name in {"convolution", "addmm"})


@pytest.mark.parametrize("projects", [True, False])
def test_a_residual_block_adds_its_inputs_to_what_its_layers_make(projects: bool) -> None:
    torch.manual_seed(0)
    for inputs, outputs, stride, inner in ((4, 4, 1, None), (4, 6, 2, None), (4, 8, 1, 2)):
        block = Residual(inputs, outputs, stride, inner, projects=projects)
        x = torch.randn(2, inputs, 6, 6)
        short = torch.zeros(2, outputs, 6 // stride, 6 // stride)
        short[:, :inputs] = x[:, :, ::stride, ::stride]
        if projects and (inputs, stride) != (outputs, 1):
            short = block.short(x)
        torch.testing.assert_close(block(x), torch.relu(block.layers(x) + short))


def test_a_dense_layer_passes_on_its_inputs_before_what_it_makes_of_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, 6)
    out = Dense(5, 3)(x)
    assert out.shape == (2, 5 + 3, 6, 6)
    assert torch.equal(out[:, :5], x)


def test_googlenet_has_the_operations_the_weights_and_the_27_layers_of_the_survey() -> None:
    with torch.device("meta"):
        network = googlenet().eval()
        graph = traced(lambda: network(torch.zeros(1, 3, 224, 224)))
    assert products(graph) == pytest.approx(1566e6, rel=0.02)
    assert sum(each.numel() for each in network.parameters()) == pytest.approx(6.8e6, rel=0.03)
    with_weights = {"convolution", "addmm"}
    assert most_on_a_path(graph, with_weights) == 22
    assert most_on_a_path(graph, with_weights | {"max_pool2d_with_indices", "mean"}) == 27


def most_on_a_path(graph: OperatorGraph, names: set[str]) -> int:
    """Return the most operations of these names that come one after another."""
    ends: list[int] = []
    for each in graph.operations:
        ends.append((each.name in names) + max((ends[need] for need in each.needs), default=0))
    return max(ends)


@pytest.mark.parametrize(
    "make", [lambda: resnet(18, 5), lambda: resnet_for_cifar(20), lambda: densenet_for_cifar(16, 4)]
)
def test_they_compute(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    out = make()(torch.randn(2, 3, 32, 32))
    out.sum().backward()
    assert torch.isfinite(out).all()

"""Costs of a network, against what can be computed by hand; and weights that a child takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.search.spaces.architectures.inherit import inherited
from orchestray.search.spaces.architectures.measure import measure


def test_parameters_and_flops_are_those_of_the_formula() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(8 * 16, 5))
    measures = measure(network, (3, 4, 4), passes=3)
    assert measures.parameters == 3 * 8 * 9 + 128 * 5 + 5
    assert measures.flops == 2 * (3 * 8 * 9 * 16) + 2 * (128 * 5)
    assert measures.latency_ms > 0
    assert measures.to_json().keys() == {"parameters", "flops", "latency_ms", "batch_latency_ms", "batch_size"}


def test_measuring_leaves_the_network_and_the_threads_as_they_were() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    network[2].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.set_num_threads(2)
    try:
        measure(network, (1, 8, 8), passes=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [module.training for module in network] == [True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_tensor_with_two_names_counts_once_and_a_frozen_one_not_at_all() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    network[2].weight.requires_grad_(requires_grad=False)
    assert measure(network, (4,), passes=1).parameters == 16 + 4 + 4


def test_a_child_takes_the_tensors_of_its_parents_names_and_shapes() -> None:
    parent = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5), "d": torch.ones(2, dtype=torch.int64)}
    child = {"a": torch.zeros(2, 3), "b": torch.zeros(6), "e": torch.zeros(5), "d": torch.zeros(2)}
    taken = inherited(parent, child)
    assert taken.keys() == {"a"}
    assert torch.equal(taken["a"], parent["a"])
    taken["a"].zero_()
    assert bool(parent["a"].all()), "they are copies"


@pytest.mark.parametrize(("before", "after"), [((2, 3), (4, 3)), ((4, 3), (2, 5)), ((2, 3, 3, 3), (4, 2, 5, 5))])
def test_of_a_widened_layer_a_child_takes_what_both_have(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    taken = inherited({"w": torch.ones(before)}, {"w": torch.zeros(after)}, overlap=True)["w"]
    both = tuple(slice(0, min(pair)) for pair in zip(before, after, strict=True))
    assert taken.shape == after
    assert bool((taken[both] == 1).all())
    assert taken.sum() == taken[both].numel()

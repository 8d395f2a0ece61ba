"""One network for all cells: children share its tensors, and taken out they compute what they computed in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchestray.search.spaces.architectures.cell import Cell

SPACES = {
    "two cells": {"nodes": 3},
    "one node": {"nodes": 1},
    "one stack": {"nodes": 2, "reductions": 0, "cells": 2},
    "pools": {"nodes": 3, "reduction": "pool", "reductions": 2},
    "reduced alike": {"nodes": 3, "reduction": "same"},
}


def made(name: str) -> Cell:
    arguments: dict[str, object] = {"operations": ["identity", "conv_3x3", "separable_3x3", "max_3x3"], "channels": 4}
    return Cell(**{**arguments, **SPACES[name]})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("is_training", [False, True])
def test_a_child_taken_out_computes_what_it_computed_inside(name: str, is_training: bool) -> None:
    space = made(name)
    net = space.supernet((1, 8, 8), 5).train(is_training)
    rng = np.random.default_rng(0)
    for _ in range(4):
        genome = space.sample(rng)
        child = space.build(genome, (1, 8, 8), 5).train(is_training)
        child.load_state_dict(net.child_state(genome))
        inputs = torch.randn(3, 64)
        torch.testing.assert_close(child(inputs), net(inputs, genome))


def test_children_share_the_same_tensors() -> None:
    space = made("two cells")
    net = space.supernet((1, 8, 8), 5)
    a, b = (space.sample(np.random.default_rng(seed)) for seed in (0, 1))
    of_a, of_b = net.child_modules(a), net.child_modules(b)
    common = of_a.keys() & of_b.keys()
    assert {"stem", "head"} < common
    assert all(of_a[name] is of_b[name] for name in common)
    net(torch.randn(2, 64), a).sum().backward()
    touched = {name for name, module in net.shared.items() if any(p.grad is not None for p in module.parameters())}
    assert touched == {name for name, module in of_a.items() if list(module.parameters())}


def test_with_all_weight_on_one_operation_the_mixture_is_that_operation() -> None:
    """Take the mixture of one node with two inputs: the sum of both edges is the child that has both."""
    space = Cell(nodes=1, operations=["conv_3x3", "max_3x3"], reductions=0, channels=4)
    net = space.supernet((1, 8, 8), 5).eval()
    inputs = torch.randn(3, 64)
    for first in range(2):
        for second in range(2):
            alphas = torch.full((2, 2), -1e4)
            alphas[0, first] = alphas[1, second] = 1e4
            genome = net.genome_of_alphas({"normal": alphas})
            assert genome["normal.0.left.operation"] == space.operations[first]
            assert genome["normal.0.right.operation"] == space.operations[second]
            torch.testing.assert_close(net.forward_mixed(inputs, {"normal": alphas}), net(inputs, genome))


@pytest.mark.parametrize("name", SPACES)
def test_the_mixture_has_a_gradient_for_every_alpha_and_every_weight(name: str) -> None:
    space = made(name)
    net = space.supernet((1, 8, 8), 5)
    alphas = {cell: torch.randn(shape, requires_grad=True) for cell, shape in net.alpha_shapes.items()}
    net.forward_mixed(torch.randn(4, 64), alphas).square().sum().backward()
    for alpha in alphas.values():
        assert alpha.grad is not None
        assert bool((alpha.grad != 0).any(dim=1).all())
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_alphas_speak_for_the_two_heaviest_edges_of_a_node() -> None:
    space = made("one stack")
    net = space.supernet((1, 8, 8), 5)
    alphas = torch.zeros(net.alpha_shapes["normal"])
    alphas[net.edges.index((1, 0)), 2] = 3.0
    alphas[net.edges.index((1, 2)), 3] = 2.0
    genome = net.genome_of_alphas({"normal": alphas})
    assert (genome["normal.1.left.from"], genome["normal.1.left.operation"]) == (0, space.operations[2])
    assert (genome["normal.1.right.from"], genome["normal.1.right.operation"]) == (2, space.operations[3])

"""The program that made the table trains the very networks of the space."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.tabular.batched import BatchedCells, evaluate, train
from lab.tabular.space import CHANNELS, NUM_NODES, OPERATIONS, table_cells
from lab.tabular.table import genome_at, number_of
from orchestray.search.spaces.architectures.cell import NORMAL, Cell, CellNodes
from orchestray.search.spaces.architectures.network import PlannedNetwork

NUM_SEEDS = 2


def drawn(num: int) -> tuple[Cell, list[dict[str, object]], list[CellNodes]]:
    space, rng = table_cells(), np.random.default_rng(0)
    genomes = [space.sample(rng) for _ in range(num)]
    return space, genomes, [space.nodes_in(genome)[NORMAL] for genome in genomes]


def take_weights(network: PlannedNetwork, batched: BatchedCells, cell: CellNodes, model: int) -> None:
    """Give a network of the space the weights of one model of the batch."""

    def block(weights: Tensor, index: int) -> Tensor:
        return weights[index * CHANNELS : (index + 1) * CHANNELS]

    def put(name: str, weight: Tensor) -> None:
        if name in network.steps:
            next(network.steps[name].parameters()).copy_(weight)

    put("stem", block(batched.stem, model))
    for value in range(2):
        put(f"cell0_input{value}", block(batched.fits[value], model))
    for index, node in enumerate(cell):
        taken: set[str] = set()
        for side, (source, operation) in enumerate(zip(node.sources, node.operations, strict=True)):
            if not operation.startswith("conv"):
                continue
            having = batched.sides[index][side]  # type: ignore[index]
            order = sorted(range(batched.num_models), key=lambda one: ALL_OPERATIONS[one][index][side])
            place = [one for one in order if ALL_OPERATIONS[one][index][side] == operation].index(model)
            name = f"cell0_node{index}_from{source}_{operation}"
            name = f"{name}_2" if name in taken else name
            taken.add(name)
            put(name, block(having.weights[operation], place))
    loose = batched.loose[model].bool()
    linear = network.steps["head"][1]  # type: ignore[index]
    linear.weight.copy_(batched.head[model, :-1][loose].T)
    linear.bias.copy_(batched.head[model, -1])


ALL_OPERATIONS: list[list[tuple[str, str]]] = []


@torch.no_grad()
def test_each_model_of_a_batch_is_the_network_that_the_space_builds() -> None:
    space, genomes, cells = drawn(12)
    batched = BatchedCells(cells, NUM_SEEDS, CHANNELS, 10).train()
    ALL_OPERATIONS[:] = [[node.operations for node in cell] for cell in cells for _ in range(NUM_SEEDS)]
    images = torch.rand(6, 1, 8, 8)
    outputs = batched(images)
    for index, (genome, cell) in enumerate(zip(genomes, cells, strict=True)):
        network = space.build(genome, (1, 8, 8), 10).train()
        assert isinstance(network, PlannedNetwork)
        take_weights(network, batched, cell, index * NUM_SEEDS + 1)
        torch.testing.assert_close(network(images), outputs[index * NUM_SEEDS + 1], rtol=1e-3, atol=1e-4)


def test_a_model_is_trained_as_if_it_were_alone() -> None:
    _, _, cells = drawn(5)
    images, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 10
    results = []
    for chosen in (cells, cells[3:4]):
        model = BatchedCells(chosen, NUM_SEEDS, CHANNELS, 10)
        train(model, images, labels, epochs=2, batch_size=8, lr=0.1)
        results.append(evaluate(model, images, labels)[1].view(len(chosen), NUM_SEEDS))
    torch.testing.assert_close(results[0][3], results[1][0], rtol=1e-3, atol=1e-3)


def test_a_model_that_has_diverged_has_the_loss_of_guessing_and_the_others_their_own() -> None:
    _, _, cells = drawn(2)
    batched = BatchedCells(cells, 1, CHANNELS, 10)
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    _, before = evaluate(batched, images, labels)
    with torch.no_grad():
        batched.head[0].fill_(torch.nan)
    _, losses = evaluate(batched, images, labels)
    assert losses[0].item() == pytest.approx(np.log(10))
    assert losses[1] == before[1]


def test_seeds_begin_with_other_weights_and_cells_of_a_seed_with_the_same() -> None:
    _, _, cells = drawn(2)
    stem = BatchedCells(cells, NUM_SEEDS, CHANNELS, 10).stem.view(2, NUM_SEEDS, -1)
    assert torch.equal(stem[0], stem[1])
    assert not torch.equal(stem[0, 0], stem[0, 1])


def test_genomes_are_numbered_in_the_order_of_their_enumeration() -> None:
    space = table_cells()
    for number, genome in enumerate(space.enumerate()):
        assert number_of(genome) == number
        assert genome_at(number) == genome
        if number == 500:
            break
    assert space.count() == number_of(genome_at(space.count() - 1)) + 1


def test_the_space_is_the_one_said() -> None:
    space = table_cells()
    assert (space.nodes, space.operations, space.reductions) == (NUM_NODES, OPERATIONS, 0)
    assert space.count() == pytest.approx(22_500)

"""The survey's spaces of architectures: cells that are stacked, and the language in which spaces are written."""

from __future__ import annotations

import json
from itertools import product
from math import isqrt, log10
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestray.search.spaces.architectures.cell import NORMAL, Cell
from orchestray.search.spaces.architectures.choices import ComposedSpace
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import SearchedTask

ROOT = Path(__file__).parents[3]


def count_unstacked(space: Cell) -> int:
    """Count the genomes if every cell of the stack were searched by itself, instead of two kinds of cell."""
    searched = [cell for cell in space.stack if cell == NORMAL or space.reduction != "pool"]
    return int(isqrt(space.count()) ** len(searched))


def test_searching_a_cell_and_stacking_it_leaves_far_fewer_architectures_to_explore() -> None:
    small = Cell(nodes=1, operations=["identity", "conv_3x3"], cells=2, reductions=1, channels=4)
    assert len(list(small.enumerate())) == small.count() == ((2 * 2) ** 2) ** 2
    assert count_unstacked(small) == ((2 * 2) ** 2) ** 5, "five cells, each by itself"
    published = Cell(nodes=5, cells=6, reductions=2, operations=[*Cell().operations, "conv_1x1", "conv_3x3"])
    assert len(published.stack) == 20
    assert log10(count_unstacked(published)) / log10(published.count()) == 10


def test_a_cell_found_in_a_small_stack_builds_a_deeper_one_of_the_same_cells_which_trains() -> None:
    space = Cell(nodes=2, cells=1, reductions=1, channels=4)
    genome = space.sample(np.random.default_rng(0))
    task = SearchedTask(
        {"type": "digits"}, {"space": "cell", "nodes": 2, "cells": 2, "reductions": 1, "channels": 4}, genome
    )
    torch.manual_seed(0)
    network = task.build_model()
    parts: dict[str, set[str]] = {}
    for name in network.state_dict():
        cell, _, part = name.partition("_")
        parts.setdefault(cell, set()).add(part)
    assert [name for name in parts if "cell" in name] == [f"steps.cell{place}" for place in range(5)]
    assert parts["steps.cell0"] == parts["steps.cell1"] == parts["steps.cell3"] == parts["steps.cell4"]
    batch = task.to_batch(task.dataset("train").slice(0, 32))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss(network(batch["inputs"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.fixture
def towers() -> ComposedSpace:
    """Return the space of configs/search/digits-own-space.yaml: one or two towers of one or two layers each."""
    made = make_space(f"{ROOT}/configs/search/spaces/towers.py:Towers")
    assert isinstance(made, ComposedSpace)
    return made


def test_deep_architect_program_counts_what_it_enumerates_and_every_sample_is_valid(towers: ComposedSpace) -> None:
    space = towers
    first, second = 2 + 2**2, 4 + 4**2
    assert space.count() == first + first * second, "by hand: one tower, or two"
    genomes = [json.dumps(genome, sort_keys=True) for genome in space.enumerate()]
    assert len(set(genomes)) == space.count()
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        genome = space.sample(rng)
        assert json.dumps(genome, sort_keys=True) in genomes
        seen.add(json.dumps(genome, sort_keys=True))
        assert space.build(genome, (1, 6, 6), 3)(torch.randn(2, 1, 6, 6)).shape == (2, 3)
    assert len(seen) > 20


def test_a_program_answers_whoever_chooses(towers: ComposedSpace) -> None:
    """Walk a program's choices one by one, as a tree search does, and any method that learns."""
    space = towers
    for num, depth, kernel in product(range(2), range(2), range(2)):
        told = {"towers": num, "depth0": depth, "kernel0.0": kernel}
        decisions = space.decide(lambda name, _options, told=told: told.get(name, 0))  # type: ignore[misc]
        genome = space.genome_of(decisions)
        assert genome["depth0"] == (1, 2)[depth]
        assert ("depth1" in genome) == (num == 1)
        assert space.decisions_of(genome) == decisions

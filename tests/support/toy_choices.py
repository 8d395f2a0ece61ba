"""Small programs of choices with a known best, for methods that answer choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.search.spaces.architectures.base import Genome, Graph, Node
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose

if TYPE_CHECKING:
    from torch import nn


class Toy(ChoiceSpace):
    """A program that is only answered: what it builds is of no interest."""

    def graph(self, genome: Genome) -> Graph:
        nodes = tuple(Node(name, f"{name}={value}") for name, value in genome.items())
        return Graph(nodes, tuple((index, index + 1) for index in range(len(nodes) - 1)))

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        raise AssertionError("a toy is not built")


class Layers(Toy):
    """A space of `num_layers` layers, each with a kind, and a width where it is dense."""

    def __init__(self, num_layers: int = 3) -> None:
        self.num_layers = num_layers

    def compose(self, choose: Choose) -> None:
        for layer in range(self.num_layers):
            if choose(f"{layer}.kind", ["dense", "pool", "none"]) == "dense":
                choose(f"{layer}.width", [8, 16, 32])


class Cells(Toy):
    """A space of cells of one to `most_nodes` nodes, each with an input and an operation."""

    operations = ("convolution", "separable", "max", "average", "identity")

    def __init__(self, most_nodes: int = 3) -> None:
        self.most_nodes = most_nodes

    def compose(self, choose: Choose) -> None:
        for node in range(choose("nodes", list(range(1, self.most_nodes + 1)))):
            choose(f"{node}.input", list(range(-1, node)))
            choose(f"{node}.operation", list(self.operations))


def cell_score(genome: Mapping[str, Any]) -> float:
    """Return the worth of a cell: separable convolutions in a row are best, and each node counts.

    The best score is `most_nodes`.
    """
    worth = {"separable": 1.0, "convolution": 0.6, "max": 0.3, "average": 0.2, "identity": 0.0}
    nodes = range(genome["nodes"])
    return sum(worth[genome[f"{node}.operation"]] - 0.1 * (node - 1 - genome[f"{node}.input"]) for node in nodes)


def layer_score(genome: Mapping[str, Any]) -> float:
    """Return the worth of a network: 1.0 for the best, which is dense 16, pool, dense 32 (of three layers)."""
    best = {"0.kind": "dense", "0.width": 16, "1.kind": "pool", "2.kind": "dense", "2.width": 32}
    return sum(genome.get(name) == value for name, value in best.items()) / len(best)

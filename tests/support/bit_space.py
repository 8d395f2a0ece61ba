"""A space of bit strings, for tests of methods: what is chosen matters, not what is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from orchestray.search.spaces.architectures.base import Genome, Graph, Node
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose


class BitSpace(ChoiceSpace):
    """`stages` strings of `bits` binary choices each."""

    def __init__(self, bits: int, stages: int = 1) -> None:
        self.bits = bits
        self.stages = stages

    def compose(self, choose: Choose) -> None:
        for stage in range(self.stages):
            for bit in range(self.bits):
                choose(f"stage{stage}.bit{bit}", [0, 1])

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_outputs))

    def graph(self, genome: Genome) -> Graph:
        return Graph(tuple(Node(name, str(value)) for name, value in genome.items()), ())


def num_ones(genome: Mapping[str, Any]) -> float:
    """Return the number of ones among the bits (the problem OneMax)."""
    return float(sum(genome.values()))

"""Motifs made of motifs: the space of hierarchical representations.

H. Liu et al., "Hierarchical Representations for Efficient Architecture Search", 2018, section 2. The motifs of level 1
are operations. A motif of level l is a graph of a few nodes; each edge is a motif of level l - 1, or absent. A node
concatenates the results of its edges, and a 1 x 1 convolution restores the number of channels. The only motif of the
last level is the cell, which is stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace, Decision
from orchestray.search.spaces.architectures.genetic import pairs
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan

OPERATIONS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "identity": ("identity", {}),
    "conv_1x1": ("conv", {"kernel": 1}),
    "conv_3x3": ("conv", {"kernel": 3}),
    "depthwise_3x3": ("depthwise", {"kernel": 3}),
    "separable_3x3": ("separable", {"kernel": 3}),
    "max_3x3": ("max_pool", {"kernel": 3}),
    "average_3x3": ("average_pool", {"kernel": 3}),
}
"""Maps the name of a level 1 motif to the kind and the arguments of its step."""

NONE: Final = 0
"""Value of an absent edge; k is the k-th motif of the level below, from 1."""

Motif = list[int]
"""Value of the edge of each pair of nodes, in the order of `genetic.pairs`."""


class Hierarchical(ComposedSpace):
    """A space of cells made of motifs, stacked. A genome is {"level2": [motif, ...], "level3": [motif]}.

    A node that no path reaches is left out; a cell whose last node no path reaches returns its input.
    """

    def __init__(
        self,
        *,
        operations: Sequence[str] = (
            "conv_1x1",
            "depthwise_3x3",
            "separable_3x3",
            "max_3x3",
            "average_3x3",
            "identity",
        ),
        motifs: Sequence[int] = (6,),
        nodes: Sequence[int] = (4, 5),
        cells: int = 1,
        channels: int = 16,
        reductions: int = 1,
    ) -> None:
        """
        Args:
            operations: motifs of level 1: names from `OPERATIONS`.
            motifs: number of motifs of each level from 2 to the last but one.
            nodes: number of nodes of a motif, for each level from 2 to the last.
            cells: number of consecutive cells before, between and after the reductions.
            channels: channels of the first cells; each reduction doubles them.
            reductions: number of times that height and width are halved, by a separable convolution of stride 2.
        """
        self.operations, self.nodes = tuple(operations), tuple(nodes)
        self.motifs = (*motifs, 1)
        """Number of motifs of each level from 2."""
        self.cells, self.channels, self.reductions = cells, channels, reductions
        self._check()

    @property
    def levels(self) -> range:
        """Levels whose motifs are searched."""
        return range(2, len(self.nodes) + 2)

    def num_below(self, level: int) -> int:
        """Return the number of motifs of the level below."""
        return len(self.operations) if level == 2 else self.motifs[level - 3]

    def answer(self, choose: Choose) -> dict[str, list[Motif]]:
        return {
            f"level{level}": [
                [choose(name, range(self.num_below(level) + 1)) for name in self._edges(level, motif)]
                for motif in range(self.motifs[level - 2])
            ]
            for level in self.levels
        }

    def compose(self, choose: Choose) -> Plan:
        chosen = self.answer(choose)
        draft = Draft()
        value = draft.step("conv", INPUT, name="stem", channels=self.channels, kernel=3)
        channels = self.channels
        for part in range(self.reductions + 1):
            if part:
                channels *= 2
                value = draft.step("separable", value, name=f"reduction{part}", channels=channels, kernel=3, stride=2)
            for cell in range(self.cells):
                given = self._expanded(draft, chosen, self.levels[-1], 1, value, f"cell{part * self.cells + cell}")
                value = value if given is None else given
        return draft.plan(value)

    def genome_of(self, decisions: Sequence[Decision]) -> dict[str, list[Motif]]:
        values = iter(decision.value for decision in decisions)
        return {
            f"level{level}": [
                [next(values) for _ in self._edges(level, motif)] for motif in range(self.motifs[level - 2])
            ]
            for level in self.levels
        }

    def chosen_in(self, genome: Genome) -> Mapping[str, Any]:
        try:
            return {
                name: value
                for level in self.levels
                for motif in range(self.motifs[level - 2])
                for name, value in zip(self._edges(level, motif), genome[f"level{level}"][motif], strict=True)
            }
        except (KeyError, IndexError, TypeError, ValueError):
            shape = {f"level{level}": f"{self.motifs[level - 2]} motifs" for level in self.levels}
            raise ConfigError(f"a genome of this space has {shape}, each a list of its edges, got {genome!r}") from None

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change one edge to another motif or none; level, motif and nodes are drawn at random (section 3.1)."""
        chosen = dict(self.chosen_in(genome))
        level = int(rng.integers(self.levels.start, self.levels.stop))
        motif = int(rng.integers(self.motifs[level - 2]))
        later = int(rng.integers(1, self.nodes[level - 2]))
        name = f"level{level}.{motif}.{int(rng.integers(later)) + 1}-{later + 1}"
        others = [index for index in range(self.num_below(level) + 1) if index != chosen[name]]
        chosen[name] = others[int(rng.integers(len(others)))]
        return self.genome_of(self.decide(lambda edge, _options: int(chosen[edge])))

    def count(self) -> int:
        """Return the number of genomes."""
        return prod(
            (self.num_below(level) + 1) ** (len(pairs(self.nodes[level - 2])) * self.motifs[level - 2])
            for level in self.levels
        )

    def _edges(self, level: int, motif: int) -> list[str]:
        """Return the names of the choices for a motif's edges."""
        return [f"level{level}.{motif}.{a + 1}-{b + 1}" for a, b in pairs(self.nodes[level - 2])]

    def _expanded(
        self, draft: Draft, chosen: Mapping[str, list[Motif]], level: int, index: int, value: int, name: str
    ) -> int | None:
        """Apply the `index`-th motif (from 1) of a level to a value; return None if its output is not reached."""
        channels, halvings = draft.forms[value].channels, draft.forms[value].halvings
        assert channels is not None
        if level == 1:
            return self._operated(draft, index, value, name, channels)
        values: dict[int, int] = {0: value}
        edges = dict(zip(pairs(self.nodes[level - 2]), chosen[f"level{level}"][index - 1], strict=True))
        for node in range(1, self.nodes[level - 2]):
            given = []
            for before in range(node):
                edge = edges[before, node]
                if edge != NONE and before in values:
                    place = f"{name}_{before + 1}-{node + 1}"
                    given.append(self._expanded(draft, chosen, level - 1, edge, values[before], place))
            there = [made for made in given if made is not None]
            if there:
                merged = draft.concat(there, f"{name}_node{node + 1}_concat")
                values[node] = draft.fit(merged, channels, halvings, f"{name}_node{node + 1}")
        return values.get(self.nodes[level - 2] - 1)

    def _operated(self, draft: Draft, index: int, value: int, name: str, channels: int) -> int:
        kind, arguments = OPERATIONS[self.operations[index - 1]]
        if kind == "identity":
            return value
        wide: dict[str, Any] = {"channels": channels} if kind in {"conv", "separable"} else {}
        return draft.step(kind, value, name=name, **wide, **arguments)

    def _check(self) -> None:
        problems = []
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            problems.append(f"operations: there are {', '.join(OPERATIONS)}, got {', '.join(map(str, unknown))}")
        if len(self.nodes) != len(self.motifs):
            problems.append(
                f"nodes: must have a number for each level from 2, one more than `motifs` has, which is "
                f"{len(self.motifs)}, got {len(self.nodes)}"
            )
        if not self.operations or min(self.motifs) < 1 or min(self.nodes, default=2) < 2:
            problems.append("motifs: every level needs a motif at least, and a motif two nodes")
        if self.cells < 1 or self.channels < 1 or self.reductions < 0:
            problems.append("cells: cells and channels must be >= 1, reductions >= 0")
        if problems:
            raise ConfigError([f"search.architecture.{problem}" for problem in problems])

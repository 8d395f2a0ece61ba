"""Stages whose connections are written as bits: the space of Genetic CNN.

L. Xie, A. Yuille, "Genetic CNN", 2017, section 3.1. A stage of K nodes has K (K - 1) / 2 bits, one per pair, in the
order 1-2, 1-3, 2-3, 1-4, ...; a bit is set if the later node uses the output of the earlier one. A node adds its inputs
and convolves the sum. Each stage has two extra nodes. The first convolves the stage's input and feeds every node
without another input. The last adds the outputs of all nodes that no other node uses, and convolves the sum. Nodes
without any connection are left out; if no bit is set, the last node follows the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan


class Genetic(ComposedSpace):
    """A space of convolution stages and pooling. The choices are the bits, `stage<s>.<a>-<b>`, nodes from 1."""

    def __init__(
        self, *, nodes: Sequence[int] = (3, 4, 5), channels: Sequence[int] = (8, 16, 32), kernel: int = 3
    ) -> None:
        """
        Args:
            nodes: number of nodes of each stage.
            channels: channels of the convolutions of each stage.
            kernel: kernel size of the convolutions, odd.
        """
        self.nodes, self.channels, self.kernel = tuple(nodes), tuple(channels), kernel
        if not self.nodes or len(self.nodes) != len(self.channels):
            raise ConfigError(
                "search.architecture.channels: must have a number for each stage of `nodes`, which are "
                f"{len(self.nodes)}, got {len(self.channels)}"
            )
        if min(self.nodes) < 1 or min(self.channels) < 1 or kernel < 1 or kernel % 2 == 0:
            raise ConfigError("search.architecture: nodes and channels must be >= 1, kernel must be odd and >= 1")

    def compose(self, choose: Choose) -> Plan:
        draft = Draft()
        value = INPUT
        for stage, edges in enumerate(self.answer(choose)):
            if stage:
                value = draft.step("max_pool", value, name=f"stage{stage}_pool", kernel=3, stride=2)
            value = self._stage(draft, value, stage, edges)
        return draft.plan(value)

    def answer(self, choose: Choose) -> list[list[tuple[int, int]]]:
        """Return the edges of each stage."""
        return [
            [(a, b) for a, b in pairs(count) if choose(f"stage{stage}.{a + 1}-{b + 1}", (0, 1))]
            for stage, count in enumerate(self.nodes)
        ]

    def bits_of(self, genome: Genome) -> list[str]:
        """Return the bits of each stage as a string of 0 and 1."""
        bits = iter(str(decision.value) for decision in self.decisions_of(genome))
        return ["".join(next(bits) for _ in pairs(count)) for count in self.nodes]

    def genome_from(self, bits: Sequence[str]) -> dict[str, int]:
        """Return the genome of these bits: the reverse of `bits_of`.

        Raises:
            ConfigError: their number is wrong, or they contain characters other than 0 and 1.
        """
        lengths = [len(pairs(count)) for count in self.nodes]
        if [len(of_stage) for of_stage in bits] != lengths or set("".join(bits)) - {"0", "1"}:
            raise ConfigError(f"the stages of this space have {lengths} bits, each 0 or 1, got {list(bits)}")
        return {
            f"stage{stage}.{a + 1}-{b + 1}": int(bit)
            for stage, of_stage in enumerate(bits)
            for (a, b), bit in zip(pairs(self.nodes[stage]), of_stage, strict=True)
        }

    def count(self) -> int:
        """Return the number of genomes: 2 to the number of bits."""
        return int(2 ** sum(len(pairs(count)) for count in self.nodes))

    def text(self, genome: Genome) -> str:
        """Return the notation of the paper, which groups the bits of a node: "1-01"."""
        stages = []
        for count, bits in zip(self.nodes, self.bits_of(genome), strict=True):
            starts = [node * (node - 1) // 2 for node in range(1, count + 1)]
            stages.append("-".join(bits[a:b] for a, b in pairwise(starts)))
        return " | ".join(stages)

    def _stage(self, draft: Draft, value: int, stage: int, edges: Sequence[tuple[int, int]]) -> int:
        def convolved(inputs: Sequence[int], name: str) -> int:
            total = draft.add(inputs, f"stage{stage}_{name}_add")
            conv = f"stage{stage}_{name}"
            return draft.step("conv", total, name=conv, channels=self.channels[stage], kernel=self.kernel)

        first = convolved([value], "first")
        values: dict[int, int] = {}
        for node in sorted({node for edge in edges for node in edge}):
            used = [values[a] for a, b in edges if b == node]
            values[node] = convolved(used or [first], f"node{node + 1}")
        loose = [values[node] for node in values if all(a != node for a, _ in edges)]
        return convolved(loose or [first], "last")


def pairs(count: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes (from 0) in the order of the bits: those ending in node 1, then in 2, ..."""
    return [(a, b) for b in range(count) for a in range(b)]

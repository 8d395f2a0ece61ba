"""Stacks of searched cells: the space of NASNet and AmoebaNet.

B. Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", 2018, section 3.2, and E. Real et
al., "Regularized Evolution for Image Classifier Architecture Search", 2019, section 3.1. The two inputs of a cell are
the outputs of the two cells before. Each node adds two values, each an operation applied to an input or an earlier
node. The cell's output is the concatenation of the nodes that no other node uses. A reduction cell has the same
structure, with stride 2 on its inputs and twice the channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.supernet import CellSuperNet

OPERATIONS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "identity": ("identity", {}),
    "conv_1x1": ("conv", {"kernel": 1}),
    "conv_3x3": ("conv", {"kernel": 3}),
    "conv_5x5": ("conv", {"kernel": 5}),
    "separable_3x3": ("separable", {"kernel": 3}),
    "separable_5x5": ("separable", {"kernel": 5}),
    "separable_7x7": ("separable", {"kernel": 7}),
    "dilated_3x3": ("separable", {"kernel": 3, "dilation": 2}),
    "average_3x3": ("average_pool", {"kernel": 3}),
    "max_3x3": ("max_pool", {"kernel": 3}),
}
"""Maps the name of an operation to the kind and the arguments of its step."""

NORMAL: Final = "normal"
REDUCTION: Final = "reduction"
NUM_INPUTS: Final = 2
"""Number of inputs of a cell: the outputs of the previous cell and of the one before that."""


@dataclass(frozen=True)
class Node:
    """A node of a cell: the sum of two operations, each on an earlier value (in the supernet: of all of them)."""

    sources: tuple[int, ...]
    """Sources of its values: 0 is the previous cell, 1 the one before, 2 and more are nodes of the same cell."""
    operations: tuple[str, ...]


CellNodes = tuple[Node, ...]


class Cell(ComposedSpace):
    """A space of networks stacked from a normal and a reduction cell.

    The choices are `<cell>.<node>.<side>.from` and `<cell>.<node>.<side>.operation` for the cells "normal" and
    "reduction", the nodes from 0, and the sides "left" and "right". The stack is `cells` normal cells, followed
    `reductions` times by a reduction cell and `cells` normal ones.
    """

    makes_the_same_choices = True

    def __init__(
        self,
        *,
        nodes: int = 5,
        operations: Sequence[str] = (
            "identity",
            "separable_3x3",
            "separable_5x5",
            "dilated_3x3",
            "average_3x3",
            "max_3x3",
        ),
        cells: int = 1,
        channels: int = 16,
        reductions: int = 1,
        reduction: str = "searched",
    ) -> None:
        """
        Args:
            nodes: number of nodes of a cell.
            operations: names from `OPERATIONS`.
            cells: number of normal cells before, between and after the reductions.
            channels: channels of the first cells; each reduction doubles them.
            reductions: number of times that height and width are halved.
            reduction: "searched": by a cell of its own; "same": by the structure of the normal cell; "pool": by max
                pooling.
        """
        self.nodes, self.cells, self.channels, self.reductions = nodes, cells, channels, reductions
        self.operations = tuple(operations)
        self.reduction = reduction
        self._check()

    @property
    def cell_names(self) -> tuple[str, ...]:
        """Names of the cells that are searched."""
        return (NORMAL, REDUCTION) if self.reductions and self.reduction == "searched" else (NORMAL,)

    @property
    def stack(self) -> tuple[str, ...]:
        """Names of the network's cells, in order."""
        normal = (NORMAL,) * self.cells
        return normal + ((REDUCTION, *normal) * self.reductions)

    def compose(self, choose: Choose) -> Plan:
        return self.plan_of(self.answer(choose))

    def answer(self, choose: Choose) -> dict[str, CellNodes]:
        return {cell: self._nodes(cell, choose, self.nodes) for cell in self.cell_names}

    def plan(self, genome: Genome) -> Plan:
        return self.plan_of(self.nodes_in(genome))

    def nodes_in(self, genome: Genome) -> dict[str, CellNodes]:
        """Return the nodes of each cell of a genome; a cell may have fewer than the space allows.

        Raises:
            ConfigError: the genome does not belong to this space.
        """
        pick = self._answers(genome)
        chosen = self.chosen_in(genome)
        counts = {
            cell: sum(f"{cell}.{node}.left.from" in chosen for node in range(self.nodes)) for cell in self.cell_names
        }
        cells = {
            cell: self._nodes(cell, lambda name, options: options[pick(name, options)], max(counts[cell], 1))
            for cell in self.cell_names
        }
        if surplus := sorted(chosen.keys() - self.genome_from(cells).keys()):
            raise ConfigError(f"the genome {genome!r} makes choices that do not come up: {', '.join(surplus)}")
        return cells

    def genome_from(self, cells: Mapping[str, CellNodes]) -> dict[str, Any]:
        """Return the genome of the given cells: the reverse of `nodes_in`."""
        genome: dict[str, Any] = {}
        for cell, nodes in cells.items():
            for index, node in enumerate(nodes):
                for side, source, operation in zip(_SIDES, node.sources, node.operations, strict=True):
                    genome[f"{cell}.{index}.{side}.from"] = source
                    genome[f"{cell}.{index}.{side}.operation"] = operation
        return genome

    def count(self) -> int:
        """Return the number of genomes: for node i of a cell ((i + 2) sources x operations) squared."""
        of_cell = prod(((node + NUM_INPUTS) * len(self.operations)) ** 2 for node in range(self.nodes))
        return int(of_cell ** len(self.cell_names))

    def plan_of(self, cells: Mapping[str, CellNodes], *, all_loose: bool = False) -> Plan:
        """Return the network of these cells, which may have fewer nodes than the space allows.

        Args:
            cells: nodes of each searched cell.
            all_loose: True to include every node in the output of its cell, not only those that no other node uses.
        """
        draft = Draft()
        stem = draft.step("conv", INPUT, name="stem", shared="stem", channels=self.channels, kernel=3)
        before, last = stem, stem
        channels = self.channels
        for place, cell in enumerate(self.stack):
            stride = 1
            if cell == REDUCTION:
                stride, channels = 2, 2 * channels
            if cell == REDUCTION and self.reduction == "pool":
                before, last = last, draft.step("max_pool", last, name=f"cell{place}_pool", kernel=3, stride=2)
                continue
            nodes = cells.get(cell, cells[NORMAL])
            values = self._inputs(draft, (last, before), f"cell{place}", channels)
            made = self._stacked(draft, nodes, values, f"cell{place}", stride)
            used = set() if all_loose else {source for node in nodes for source in node.sources}
            loose = [index for index in range(len(nodes)) if index + NUM_INPUTS not in used]
            side_by_side = [made[index] for index in loose]
            before, last = last, draft.concat(side_by_side, f"cell{place}_output", loose, self.nodes)
        return draft.plan(last)

    def plan_of_all(self) -> Plan:
        """Return a plan with every operation on every edge: the modules of all candidates, under their shared names."""
        nodes = []
        for index in range(self.nodes):
            edges = [(source, operation) for source in range(index + NUM_INPUTS) for operation in self.operations]
            nodes.append(Node(tuple(source for source, _ in edges), tuple(operation for _, operation in edges)))
        return self.plan_of({cell: tuple(nodes) for cell in self.cell_names}, all_loose=True)

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> CellSuperNet:
        """Return the supernet of this space, whose candidates share their weights."""
        from orchestray.search.spaces.architectures.supernet import CellSuperNet

        return CellSuperNet(self, input_shape, num_outputs)

    def _nodes(self, cell: str, choose: Choose, count: int) -> CellNodes:
        made = []
        for index in range(count):
            picks = []
            for side in _SIDES:
                source = choose(f"{cell}.{index}.{side}.from", range(index + NUM_INPUTS))
                picks.append((source, choose(f"{cell}.{index}.{side}.operation", self.operations)))
            (left, first), (right, second) = picks
            made.append(Node((left, right), (first, second)))
        return tuple(made)

    def _inputs(self, draft: Draft, inputs: tuple[int, int], name: str, channels: int) -> list[int]:
        """Return a cell's inputs, converted to the channels of its operations and to a common size."""
        size = max(draft.forms[value].halvings for value in inputs)
        return [draft.fit(value, channels, size, f"{name}_input{i}", always=True) for i, value in enumerate(inputs)]

    def _stacked(self, draft: Draft, nodes: CellNodes, inputs: Sequence[int], name: str, stride: int) -> list[int]:
        """Add a cell to the network; return the values of its nodes."""
        values = list(inputs)
        for index, node in enumerate(nodes):
            sides = []
            for source, operation in zip(node.sources, node.operations, strict=True):
                shared = f"{name}_node{index}_from{source}_{operation}"
                of_step = stride if source < NUM_INPUTS else 1
                sides.append(_operate(draft, operation, values[source], shared, of_step))
            values.append(draft.add(sides, f"{name}_node{index}"))
        return values[NUM_INPUTS:]

    def _check(self) -> None:
        problems = []
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            problems.append(f"operations: there are {', '.join(OPERATIONS)}, got {', '.join(map(str, unknown))}")
        if not self.operations or len(set(self.operations)) != len(self.operations):
            problems.append("operations: must name some, each once")
        for name, value, least in (
            ("nodes", self.nodes, 1),
            ("cells", self.cells, 0 if self.reductions and self.reduction != "pool" else 1),
            ("channels", self.channels, 1),
            ("reductions", self.reductions, 0),
        ):
            if value < least:
                problems.append(f"{name}: must be >= {least}, got {value}")
        if self.reduction not in {"searched", "same", "pool"}:
            problems.append(f'reduction: must be "searched", "same" or "pool", got {self.reduction!r}')
        if problems:
            raise ConfigError([f"search.architecture.{problem}" for problem in problems])


_SIDES: Final = ("left", "right")


def _operate(draft: Draft, operation: str, value: int, shared: str, stride: int) -> int:
    """Apply an operation of a cell; identity with a stride becomes a 1 x 1 convolution, as it must change the size."""
    kind, arguments = OPERATIONS[operation]
    channels = draft.forms[value].channels
    if kind == "identity":
        if stride == 1:
            return value
        return draft.step("fit", value, name=shared, shared=shared, channels=channels, stride=stride)
    if kind.endswith("_pool"):
        return draft.step(kind, value, name=shared, stride=stride, **arguments)
    return draft.step(kind, value, name=shared, shared=shared, channels=channels, stride=stride, **arguments)

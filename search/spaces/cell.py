"""Cells found once and stacked: the space of NASNet and AmoebaNet.

B. Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", 2018, section 3.2, and E. Real et
al., "Regularized Evolution for Image Classifier Architecture Search", 2019, section 3.1. A cell has two inputs: the
results of the two cells before. Each of its nodes adds two values, each by an operation on one of the inputs or of the
nodes before. The nodes that no other uses, side by side, are the cell's result. A reduction cell is built alike, with
strides of 2 on its inputs, and twice the channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.base import Genome
from orchestray.search.spaces.choices import Choose, ComposedSpace
from orchestray.search.spaces.plan import INPUT, Draft, Plan

if TYPE_CHECKING:
    from orchestray.search.spaces.supernet import CellSuperNet

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
"""What may be done to a value, by name: a step's kind and arguments."""

NORMAL: Final = "normal"
REDUCTION: Final = "reduction"
NUM_INPUTS: Final = 2
"""Of a cell: the results of the cell before, and of the one before that."""


@dataclass(frozen=True)
class Node:
    """A node of a cell: the sum of two values (in the network of all candidates: of all), each an operation on a value
    before.
    """

    sources: tuple[int, ...]
    """0: the cell before; 1: the one before that; 2 and more: the cell's own nodes."""
    operations: tuple[str, ...]


CellNodes = tuple[Node, ...]


class Cell(ComposedSpace):
    """A normal and a reduction cell, and the stack of them.

    The choices are `<cell>.<node>.<side>.from` and `<cell>.<node>.<side>.operation` for the cells "normal" and
    "reduction", the nodes from 0, and the sides "left" and "right". The stack is `cells` normal cells, then
    `reductions` times a reduction cell and `cells` normal ones.
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
        """Args:
        nodes: of a cell.
        operations: names out of `OPERATIONS`.
        cells: normal cells before, between and after the reductions.
        channels: of the operations of the first cells; doubled by each reduction.
        reductions: how often height and width are halved.
        reduction: "searched": by a cell of its own; "same": by the normal cell's structure; "pool": by a maximum.
        """
        self.nodes, self.cells, self.channels, self.reductions = nodes, cells, channels, reductions
        self.operations = tuple(operations)
        self.reduction = reduction
        self._check()

    @property
    def cell_names(self) -> tuple[str, ...]:
        """The cells that are searched."""
        return (NORMAL, REDUCTION) if self.reductions and self.reduction == "searched" else (NORMAL,)

    @property
    def stack(self) -> tuple[str, ...]:
        """The cells of the network, in order."""
        normal = (NORMAL,) * self.cells
        return normal + ((REDUCTION, *normal) * self.reductions)

    def compose(self, choose: Choose) -> Plan:
        return self.plan_of(self.answer(choose))

    def answer(self, choose: Choose) -> dict[str, CellNodes]:
        return {cell: self._nodes(cell, choose, self.nodes) for cell in self.cell_names}

    def plan(self, genome: Genome) -> Plan:
        return self.plan_of(self.nodes_in(genome))

    def nodes_in(self, genome: Genome) -> dict[str, CellNodes]:
        """The nodes of each cell of a genome; a cell may have fewer than the space's.

        Raises:
            ConfigError: that is no genome of this space.
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
        """The genome of cells: the reverse of `nodes_in`."""
        genome: dict[str, Any] = {}
        for cell, nodes in cells.items():
            for index, node in enumerate(nodes):
                for side, source, operation in zip(_SIDES, node.sources, node.operations, strict=True):
                    genome[f"{cell}.{index}.{side}.from"] = source
                    genome[f"{cell}.{index}.{side}.operation"] = operation
        return genome

    def count(self) -> int:
        """How many genomes there are: for node i of a cell ((i + 2) sources x operations) squared."""
        of_cell = prod(((node + NUM_INPUTS) * len(self.operations)) ** 2 for node in range(self.nodes))
        return int(of_cell ** len(self.cell_names))

    def count_unstacked(self) -> int:
        """How many there would be if every cell of the stack were searched by itself."""
        of_cell = prod(((node + NUM_INPUTS) * len(self.operations)) ** 2 for node in range(self.nodes))
        searched = [cell for cell in self.stack if cell == NORMAL or self.reduction != "pool"]
        return int(of_cell ** len(searched))

    def plan_of(self, cells: Mapping[str, CellNodes], *, all_loose: bool = False) -> Plan:
        """The network of these cells; they may have fewer nodes than the space's.

        Args:
            cells: the nodes of each that is searched.
            all_loose: every node is part of its cell's result, not only those that no other uses.
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
        """Every operation on every edge: the modules of all candidates, each under the name by which it is shared."""
        nodes = []
        for index in range(self.nodes):
            edges = [(source, operation) for source in range(index + NUM_INPUTS) for operation in self.operations]
            nodes.append(Node(tuple(source for source, _ in edges), tuple(operation for _, operation in edges)))
        return self.plan_of({cell: tuple(nodes) for cell in self.cell_names}, all_loose=True)

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> CellSuperNet:
        """All networks of this space in one, which share their weights; see `CellSuperNet`."""
        from orchestray.search.spaces.supernet import CellSuperNet

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
        """A cell's inputs, brought to the channels of its operations, and to one size."""
        size = max(draft.forms[value].halvings for value in inputs)
        return [draft.fit(value, channels, size, f"{name}_input{i}", always=True) for i, value in enumerate(inputs)]

    def _stacked(self, draft: Draft, nodes: CellNodes, inputs: Sequence[int], name: str, stride: int) -> list[int]:
        """A cell in the network; returns its nodes' values."""
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
    """Apply an operation of a cell; identity with a stride is a convolution of 1 x 1, as it must change the size."""
    kind, arguments = OPERATIONS[operation]
    channels = draft.forms[value].channels
    if kind == "identity":
        if stride == 1:
            return value
        return draft.step("fit", value, name=shared, shared=shared, channels=channels, stride=stride)
    if kind.endswith("_pool"):
        return draft.step(kind, value, name=shared, stride=stride, **arguments)
    return draft.step(kind, value, name=shared, shared=shared, channels=channels, stride=stride, **arguments)

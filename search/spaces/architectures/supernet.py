"""The supernet of the space `cell`: every operation on every edge, once, shared by all candidates.

H. Pham et al., "Efficient Neural Architecture Search via Parameter Sharing", 2018 (one path at a time, `forward`), and
H. Liu et al., "DARTS: Differentiable Architecture Search", 2019 (all paths at once, weighted, `forward_mixed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.search.spaces.architectures import operations
from orchestray.search.spaces.architectures.cell import NORMAL, NUM_INPUTS, OPERATIONS, REDUCTION, Cell, Node
from orchestray.search.spaces.architectures.network import PlannedNetwork
from orchestray.search.spaces.architectures.plan import INPUT, Plan, Step

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import Genome


class CellSuperNet(nn.Module):
    """The shared weights of all genomes of a space of cells.

    Where a candidate's cell concatenates fewer nodes than there are, zeros take the positions of the others. The
    weights that follow are then those columns of the shared weights that belong to the candidate's nodes.
    """

    def __init__(self, space: Cell, input_shape: Sequence[int], num_outputs: int) -> None:
        """
        Args:
            space: space of the candidates.
            input_shape: shape of one sample.
            num_outputs: width of the final layer.
        """
        super().__init__()
        self.space = space
        whole = PlannedNetwork(space.plan_of_all(), input_shape, num_outputs)
        self.input_shape = whole.input_shape
        self.shared = whole.steps
        """Modules by the name under which candidates share them."""

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Edges of a cell, in the order of the rows of `alphas`: each a node and the source of its value.

        Sources 0 and 1 are the cell's inputs; 2 and more are the cell's nodes from 0.
        """
        return [(node, source) for node in range(self.space.nodes) for source in range(node + NUM_INPUTS)]

    @property
    def alpha_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape of the `alphas` of each searched cell: [edges, operations]."""
        return {cell: (len(self.edges), len(self.space.operations)) for cell in self.space.cell_names}

    def forward(self, inputs: Tensor, genome: Genome) -> Tensor:
        """Return the outputs [batch, num_outputs] of one candidate."""
        plan = self.space.plan(genome)
        done_with = plan.last_uses()
        values = {INPUT: inputs.reshape(inputs.shape[0], *self.input_shape)}
        for index, step in enumerate(plan.steps):
            result = self._applied(step, [values[value] for value in step.inputs])
            for value in done_with[index]:
                del values[value]
            values[index + 1] = result
        return values[len(plan.steps)]

    def forward_mixed(self, inputs: Tensor, alphas: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs [batch, num_outputs] of all candidates at once (DARTS, equation 2).

        A node is the sum over all its edges; an edge is its operations weighted by the softmax of its row of `alphas`.

        Args:
            inputs: [batch, *input_shape].
            alphas: architecture weights of each cell, with the shapes `alpha_shapes`.
        """
        weights = {cell: torch.softmax(of_cell, dim=1) for cell, of_cell in alphas.items()}
        before = last = self.shared["stem"](inputs.reshape(inputs.shape[0], *self.input_shape))
        for place, cell in enumerate(self.space.stack):
            if cell == REDUCTION and self.space.reduction == "pool":
                before, last = last, _plain("max_pool", kernel=3, stride=2)(last)
                continue
            stride = 2 if cell == REDUCTION else 1
            name = f"cell{place}"
            values = [self.shared[f"{name}_input{index}"](value) for index, value in enumerate((last, before))]
            of_cell = weights.get(cell, weights[NORMAL])
            for node in range(self.space.nodes):
                values.append(self._mixed_node(values, node, name, stride, of_cell))
            before, last = last, torch.cat(values[NUM_INPUTS:], dim=1)
        outputs: Tensor = self.shared["head"](last.mean(dim=(2, 3)))
        return outputs

    def genome_of_alphas(self, alphas: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the candidate with the largest `alphas` (DARTS, section 2.4).

        Each node keeps the two edges whose best operation has the largest weight, with that operation.
        """
        cells = {}
        for cell in self.space.cell_names:
            weight, best = torch.softmax(alphas[cell].detach(), dim=1).max(dim=1)
            nodes = []
            for node in range(self.space.nodes):
                rows = [row for row, (of_node, _) in enumerate(self.edges) if of_node == node]
                first, second = sorted(sorted(rows, key=lambda row: -float(weight[row]))[:2])
                sources = (self.edges[first][1], self.edges[second][1])
                chosen = (self.space.operations[int(best[first])], self.space.operations[int(best[second])])
                nodes.append(Node(sources, chosen))
            cells[cell] = tuple(nodes)
        return self.space.genome_from(cells)

    def child_modules(self, genome: Genome) -> dict[str, nn.Module]:
        """Return the shared modules that a candidate uses, by their names in `shared`."""
        return {step.shared: self.shared[step.shared] for step in self.space.plan(genome).steps if step.shared}

    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        """Return copies of a candidate's weights, to load into the network that the space builds from its genome."""
        plan = self.space.plan(genome)
        state = {}
        for step in plan.steps:
            if step.shared is None:
                continue
            side_by_side = _concat_before(plan, step)
            for name, tensor in self.shared[step.shared].state_dict().items():
                taken = tensor if side_by_side is None or tensor.dim() < 2 else _columns(tensor, side_by_side)
                state[f"steps.{step.name}.{name}"] = taken.detach().clone()
        return state

    def _applied(self, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        if step.kind == "concat" and step.num_slots:
            places = [torch.zeros_like(inputs[0])] * step.num_slots
            for slot, value in zip(step.slots, inputs, strict=True):
                places[slot] = value
            return torch.cat(places, dim=1)
        module = _plain(step.kind, **dict(step.arguments)) if step.shared is None else self.shared[step.shared]
        result: Tensor = module(*inputs)
        return result

    def _mixed_node(self, values: Sequence[Tensor], node: int, name: str, stride: int, weights: Tensor) -> Tensor:
        """Return the sum of all edges into a node; `weights` [edges, operations] cover the whole cell."""
        first_row = self.edges.index((node, 0))
        parts = []
        for source, value in enumerate(values):
            step_stride = stride if source < NUM_INPUTS else 1
            for column, operation in enumerate(self.space.operations):
                shared = f"{name}_node{node}_from{source}_{operation}"
                result = self._operated(operation, shared, value, step_stride)
                parts.append(weights[first_row + source, column] * result)
        return torch.stack(parts).sum(dim=0)

    def _operated(self, operation: str, shared: str, value: Tensor, stride: int) -> Tensor:
        kind, arguments = OPERATIONS[operation]
        if kind == "identity" and stride == 1:
            return value
        module = _plain(kind, **arguments, stride=stride) if kind.endswith("_pool") else self.shared[shared]
        result: Tensor = module(value)
        return result


def _plain(kind: str, **arguments: Any) -> nn.Module:
    """Return the module of an operation without weights."""
    return operations.build(kind, arguments, [(1, 1, 1)], 1)[0]


def _concat_before(plan: Plan, step: Step) -> Step | None:
    """Return the concatenation whose channels a step's weights apply to; None if there is none."""
    before = plan.steps[step.inputs[0] - 1] if step.inputs[0] != INPUT else None
    if before is not None and before.kind in {"global_average", "max_pool"}:
        return _concat_before(plan, before)
    return before if before is not None and before.kind == "concat" and before.num_slots else None


def _columns(weight: Tensor, concat: Step) -> Tensor:
    """Return the columns for the candidate's slots, out of weights [outputs, slots x channels, ...]."""
    outputs, inputs = weight.shape[:2]
    apart = weight.reshape(outputs, concat.num_slots, inputs // concat.num_slots, *weight.shape[2:])
    return apart[:, list(concat.slots)].flatten(1, 2)

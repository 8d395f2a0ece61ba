"""A backward pass in two halves: the gradients of a stage's inputs first, those of its weights later.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2: the previous stage waits only for the input
gradients, so the weight gradients can fill gaps of the schedule.

The graph tells the halves apart. A node *leads* if an input of the stage is behind it. If parameters too are behind a
leading node, through nodes that do not lead, the first half keeps the gradient that flows into it. The second half
starts there. No gradient is computed in both halves, and each has the same bits as in a whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Group:
    """Nodes with parameters in common."""

    nodes: list[Node] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


class SplitBackward:
    """One backward pass through a graph, done in `input_gradients` and then `accumulate`.

    Args:
        roots: graph edges where it begins.
        gradients: gradients of the roots.
        leaves: tensors whose gradients come first.
    """

    def __init__(self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._roots = list(roots)
        self._gradients = list(gradients)
        self._leaves = list(leaves)
        self._groups: list[_Group] = []
        self._inflow: dict[Node, Gradients] = {}

    def input_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the leaves; None for one that the roots do not depend on."""
        leads = _leading([root.node for root in self._roots], {get_gradient_edge(leaf).node for leaf in self._leaves})
        branching = [node for node, is_leading in leads.items() if is_leading and _branches(node, leads)]
        for root, gradient in zip(self._roots, self._gradients, strict=True):
            if not leads[root.node]:
                self._keep_root(root, gradient)
        handles = [node.register_prehook(partial(self._keep, node)) for node in branching]
        starts = [(root, grad) for root, grad in zip(self._roots, self._gradients, strict=True) if leads[root.node]]
        try:
            found: Sequence[Tensor | None] = [None] * len(self._leaves)
            if starts:
                found = torch.autograd.grad(
                    [root for root, _ in starts],
                    self._leaves,
                    [grad for _, grad in starts],
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            for handle in handles:
                handle.remove()
        self._groups = _grouped(list(self._inflow), leads)
        self._roots, self._gradients, self._leaves = [], [], []
        return list(found)

    def accumulate(self) -> None:
        """Add to `.grad` of every parameter, as a backward pass does, and call its hooks. Frees the graph."""
        # Groups of several nodes first: the way between their nodes passes through other groups' nodes, which must not
        # have been freed.
        for group in sorted(self._groups, key=lambda group: -len(group.nodes)):
            edges, gradients = [], []
            for node in group.nodes:
                for number, gradient in enumerate(self._inflow[node]):
                    if gradient is not None:
                        edges.append(GradientEdge(node, number))
                        gradients.append(gradient)
            together = len(group.nodes) > 1
            # A node's kept inflow already includes what it gets from the group's other nodes.
            handles = [node.register_prehook(_replace(self._inflow[node])) for node in group.nodes if together]
            try:
                torch.autograd.backward(edges, gradients, retain_graph=together, inputs=group.parameters)
            finally:
                for handle in handles:
                    handle.remove()
        self._groups, self._inflow = [], {}

    def _keep(self, node: Node, inflow: Gradients) -> None:
        self._inflow[node] = inflow

    def _keep_root(self, root: GradientEdge, gradient: Tensor) -> None:
        """Keep the gradient of a root with only parameters behind it: the second half starts there."""
        inflow = list(self._inflow.get(root.node, ()))
        inflow += [None] * (root.output_nr + 1 - len(inflow))
        before = inflow[root.output_nr]
        inflow[root.output_nr] = gradient if before is None else before + gradient
        self._inflow[root.node] = tuple(inflow)


def _leading(starts: Sequence[Node], targets: set[Node]) -> dict[Node, bool]:
    """Return, for every node reached from `starts`, True if it is one of `targets` or has one behind it."""
    leads: dict[Node, bool] = {}
    stack = [(node, False) for node in starts]
    while stack:
        node, is_expanded = stack.pop()
        if is_expanded:
            leads[node] = node in targets or any(
                leads.get(behind, False) for behind, _ in node.next_functions if behind is not None
            )
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((behind, False) for behind, _ in node.next_functions if behind is not None)
    return leads


def _branches(node: Node, leads: dict[Node, bool]) -> bool:
    return any(behind is not None and not leads[behind] for behind, _ in node.next_functions)


def _grouped(nodes: Sequence[Node], leads: dict[Node, bool]) -> list[_Group]:
    """Group the nodes so that no two groups share a node on the way to their parameters."""
    owner: dict[Node, _Group] = {}
    groups: list[_Group] = []
    for node in nodes:
        reached = _behind(node, leads)
        merged = _Group([node], [])
        for before in {id(owner[other]): owner[other] for other in reached if other in owner}.values():
            merged.nodes = before.nodes + merged.nodes
            merged.parameters += before.parameters
            groups.remove(before)
            for other, group in owner.items():
                if group is before:
                    owner[other] = merged
        known = {id(parameter) for parameter in merged.parameters}
        for other in reached:
            owner[other] = merged
            parameter = _parameter(other)
            if parameter is not None and id(parameter) not in known:
                merged.parameters.append(parameter)
                known.add(id(parameter))
        groups.append(merged)
    return [group for group in groups if group.parameters]


def _behind(node: Node, leads: dict[Node, bool]) -> list[Node]:
    """Return the non-leading nodes reached from `node` through such nodes alone; itself too if it does not lead."""
    found: dict[Node, None] = {} if leads[node] else {node: None}
    stack = [behind for behind, _ in node.next_functions if behind is not None and not leads[behind]]
    while stack:
        at = stack.pop()
        if at not in found:
            found[at] = None
            stack.extend(behind for behind, _ in at.next_functions if behind is not None)
    return list(found)


def _parameter(node: Node) -> Tensor | None:
    """Return the tensor that a node at the end of the graph accumulates into."""
    if node.name() != "torch::autograd::AccumulateGrad":
        return None
    parameter: Tensor = node.variable  # type: ignore[attr-defined]
    return parameter


def _replace(inflow: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _arrived: inflow

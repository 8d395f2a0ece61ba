"""One graph for a forward pass in both training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx


class DifferentError(Exception):
    """An error: from `node` on, the two graphs differ in more than constants."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


def choose(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """Return the constant for the current mode."""
    return in_training if training else in_evaluation


def merge(training: fx.Graph, evaluation: fx.Graph) -> None:
    """Turn the graph of training into the graph of both modes.

    Constants that differ are chosen when the graph runs, by the attribute `training`.

    Raises:
        DifferentError: they differ otherwise.
    """
    twins: dict[fx.Node, fx.Node] = {}
    nodes, others = list(training.nodes), list(evaluation.nodes)
    for node, other in zip(nodes, others, strict=False):
        if (node.op, node.target) != (other.op, other.target):
            raise DifferentError(node if node.op != "output" else other)
        differing: list[tuple[Any, Any]] = []
        if not _same((node.args, node.kwargs), (other.args, other.kwargs), twins, differing):
            raise DifferentError(node)
        if differing:
            _choose_by_mode(training, node, other)
        twins[other] = node
    if len(nodes) != len(others):
        raise DifferentError(max(nodes, others, key=len)[min(len(nodes), len(others))])


def _same(ours: Any, theirs: Any, twins: Mapping[fx.Node, fx.Node], differing: list[tuple[Any, Any]]) -> bool:
    """Return True if the arguments agree except for constants, which are added to `differing`."""
    if isinstance(ours, fx.Node) or isinstance(theirs, fx.Node):
        return isinstance(theirs, fx.Node) and twins.get(theirs) is ours
    if isinstance(ours, slice) and isinstance(theirs, slice):
        ours, theirs = [[s.start, s.stop, s.step] for s in (ours, theirs)]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return False
        return all(_same(a, b, twins, differing) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k], twins, differing) for k in ours)
    if type(ours) is not type(theirs) and not isinstance(ours, bool | int | float | str | None):
        return False
    if ours != theirs:
        differing.append((ours, theirs))
    return True


def _choose_by_mode(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    def chosen(ours: Any, theirs: Any) -> Any:
        if isinstance(ours, fx.Node) or ours == theirs:
            return ours
        if isinstance(ours, list | tuple):
            return type(ours)(chosen(a, b) for a, b in zip(ours, theirs, strict=True))
        if isinstance(ours, Mapping):
            return {key: chosen(ours[key], theirs[key]) for key in ours}
        with graph.inserting_before(node):
            flag = graph.create_node("get_attr", "training")
            pick = graph.create_node("call_function", choose, (flag, ours, theirs))
        for made in (flag, pick):
            made.meta.update(node.meta, is_flag=made is flag, is_fetched=True)
        return pick

    args, kwargs = chosen(tuple(node.args), tuple(other.args)), chosen(dict(node.kwargs), dict(other.kwargs))
    node.args, node.kwargs = args, kwargs

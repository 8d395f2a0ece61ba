"""The canonical form of a network of single nodes with weighted connections, whatever the numbers of hidden nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from orchestray.search.spaces.architectures.canonical import Certificate, canonical

Into = Mapping[int, Sequence[tuple[int, float]]]
"""Maps each node to its incoming connections: source and weight."""


def form_of(into: Into, kinds: Mapping[int, str], outputs: range) -> Any:
    """Return a JSON value that two networks share exactly if they are isomorphic.

    Nodes that lead to no output are left out. Hidden nodes are renumbered by depth, then by activation, sources and
    weights. As weights are real numbers, this nearly always distinguishes all nodes, in a fraction of the time that a
    general search takes.

    Args:
        into: incoming connections of each node; they must not form a cycle.
        kinds: activation of each hidden node.
        outputs: numbers of the outputs; smaller ones are inputs and bias, larger ones hidden.
    """
    levels = _levels(into, outputs)
    number = {node: node for node in levels[0]}
    forms: list[Any] = []
    for level in levels[1:]:
        written = sorted((kinds[node], _sides(into, number, node), node) for node in level)
        if any(one[:2] == other[:2] for one, other in pairwise(written)):
            return ["alike", *_searched(into, kinds, outputs)]  # they differ only in what uses them, if at all
        number |= {node: outputs.stop + len(forms) + place for place, (_, _, node) in enumerate(written)}
        forms += [(kind, sides) for kind, sides, _ in written]
    return [forms, [_sides(into, number, output) for output in outputs]]


def _sides(into: Into, number: Mapping[int, int], node: int) -> list[tuple[int, float]]:
    return sorted((number[source], weight) for source, weight in into.get(node, ()))


def _levels(into: Into, outputs: range) -> list[list[int]]:
    """Return the nodes that lead to an output: inputs and bias first, then hidden ones by their longest path from
    these.
    """
    depth: dict[int, int] = {}

    def depth_of(node: int) -> int:
        if node not in depth:
            above = (depth_of(source) for source, _ in into.get(node, ()))
            depth[node] = 0 if node < outputs.start else 1 + max(above, default=0)
        return depth[node]

    for output in outputs:
        depth_of(output)
    levels: list[list[int]] = [[] for _ in range(1 + max(depth.values()))]
    for node, at in depth.items():
        if node not in outputs:
            levels[at].append(node)
    return levels


def _searched(into: Into, kinds: Mapping[int, str], outputs: range) -> Certificate:
    """Return the canonical form of the graph in which each connection is a node, too, labelled with its weight."""
    labels: list[str] = []
    inputs: list[list[int]] = []
    place: dict[int, int] = {}

    def put(label: str, used: list[int]) -> int:
        labels.append(label)
        inputs.append(used)
        return len(labels) - 1

    def place_of(node: int) -> int:
        if node not in place:
            used = [put(f"weight {weight!r}", [place_of(source)]) for source, weight in into.get(node, ())]
            place[node] = put(kinds.get(node, str(node)), used)
        return place[node]

    for output in outputs:
        place_of(output)
    return canonical(labels, inputs)

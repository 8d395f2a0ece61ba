"""Hierarchical representations: the network that is built of a genome is the one that its motifs stand for.

H. Liu et al., "Hierarchical Representations for Efficient Architecture Search", 2018, section 2: a motif is a graph
whose edges are motifs of the level below. Here every edge is replaced by a copy of its motif, level by level, until all
edges are operations; what is built is read from the modules that a batch goes through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, count
from typing import Any

import networkx as nx
import numpy as np
import pytest
from networkx.algorithms.isomorphism import categorical_edge_match, categorical_node_match
from torch import fx, nn

from orchestray.search.spaces.architectures.hierarchical import Hierarchical

FIRST = ["conv_1x1", "depthwise_3x3", "separable_3x3", "max_3x3", "average_3x3", "identity"]
HAS_NO_CHANNELS = {"depthwise 3x3", "max 3x3", "average 3x3"}
COMPUTED_ONCE = {"max 3x3", "average 3x3", "concat"}
"""Operations without weights: each is the same wherever it is applied to the same."""
CHANNELS = 4


def flattened(genome: dict[str, list[list[int]]], level: int, motif: int, nodes: tuple[int, ...]) -> nx.MultiDiGraph:
    """Return a motif (counted from 0) with operations for edges: it leads from the node "in" to the node "out"."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(["in", "out"])
    if level == 1:
        graph.add_edge("in", "out", operation=FIRST[motif])
        return graph
    num_nodes = nodes[level - 2]
    named = ["in", *(f"{node}" for node in range(1, num_nodes - 1)), "out"]
    pairs = sorted(combinations(range(num_nodes), 2), key=lambda pair: (pair[1], pair[0]))
    for (begin, end), edge in zip(pairs, genome[f"level{level}"][motif], strict=True):
        if edge == 0:  # there is none
            continue
        below = flattened(genome, level - 1, edge - 1, nodes)
        inside = nx.relabel_nodes(below, {node: f"{begin}-{end}/{node}" for node in below})
        graph.update(inside)
        graph.add_edge(named[begin], f"{begin}-{end}/in", operation="identity")
        graph.add_edge(f"{begin}-{end}/out", named[end], operation="identity")
    return graph


class Drawing:
    """A network whose nodes are operations. An edge's count says how often a value is used."""

    def __init__(self) -> None:
        self.graph = nx.DiGraph()
        self._number = count()
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}

    def apply(self, label: str, values: Iterable[int]) -> int:
        used = tuple(sorted(values))
        if label in COMPUTED_ONCE and (label, used) in self._known:
            return self._known[label, used]
        node = self._known[label, used] = next(self._number)
        self.graph.add_node(node, label=label)
        self.graph.add_edges_from((value, node, {"count": times}) for value, times in Counter(used).items())
        return node

    def cell(self, flat: nx.MultiDiGraph, value: int, channels: int) -> int:
        """Apply a flattened motif; where no path leads through it, what came in goes out."""
        if not nx.has_path(flat, "in", "out"):
            return value
        between = {"in", *nx.descendants(flat, "in")} & {"out", *nx.ancestors(flat, "out")}
        values = {"in": value}
        for node in nx.topological_sort(flat.subgraph(between)):
            given = [
                self._along(operation, values[before], channels)
                for before, _, operation in flat.subgraph(between).in_edges(node, data="operation")
            ]
            if len(given) == 1:
                values[node] = given[0]
            elif given:
                values[node] = self.apply(f"fit {channels}", [self.apply("concat", given)])
        return values["out"]

    def _along(self, operation: str, value: int, channels: int) -> int:
        if operation == "identity":
            return value
        words = operation.replace("_", " ")
        return self.apply(words if words in HAS_NO_CHANNELS else f"{words} {channels}", [value])


def expanded(genome: dict[str, list[list[int]]], nodes: tuple[int, ...], reductions: int) -> nx.DiGraph:
    drawing = Drawing()
    flat = flattened(genome, len(nodes) + 1, 0, nodes)
    value = drawing.cell(flat, drawing.apply(f"conv 3x3 {CHANNELS}", [drawing.apply("input", [])]), CHANNELS)
    for part in range(1, reductions + 1):
        channels = CHANNELS * 2**part
        value = drawing.cell(flat, drawing.apply(f"separable 3x3 {channels} /2", [value]), channels)
    drawing.apply("linear", [drawing.apply("global average", [value])])
    return drawing.graph


class Steps(fx.Tracer):
    """A tracer that notes which module is called with what of which others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.startswith("steps.")


def built(space: Hierarchical, genome: Any) -> nx.DiGraph:
    """Return the modules of a built network as a batch goes through them."""
    network: Any = space.build(genome, (1, 8, 8), 3)
    labels = {f"steps.{step.name}": step.label for step in network.plan.steps}
    traced = Steps().trace(network)
    graph = nx.DiGraph()
    graph.add_node("input", label="input")
    for node in traced.nodes:
        if node.op == "call_module":
            graph.add_node(node.name, label=labels[node.target])
            used = Counter(value.name if value.op == "call_module" else "input" for value in node.args)
            graph.add_edges_from((value, node.name, {"count": times}) for value, times in used.items())
    return graph


@pytest.mark.parametrize(
    ("motifs", "nodes", "reductions"), [((6,), (3, 3), 1), ((3,), (4, 4), 0), ((3, 2), (3, 3, 3), 0), ((), (4,), 2)]
)
def test_the_network_built_of_hierarchical_motifs_is_their_expansion(
    motifs: tuple[int, ...], nodes: tuple[int, ...], reductions: int
) -> None:
    space = Hierarchical(operations=FIRST, motifs=motifs, nodes=nodes, channels=CHANNELS, reductions=reductions)
    same_node, same_edge = categorical_node_match("label", None), categorical_edge_match("count", None)
    rng = np.random.default_rng(len(nodes))
    sizes = set()
    for _ in range(12):
        genome = space.sample(rng)
        wanted, found = expanded(genome, nodes, reductions), built(space, genome)
        assert nx.is_isomorphic(found, wanted, same_node, same_edge), genome
        sizes.add(len(found))
        mutant = space.mutate(genome, rng)
        is_same = nx.is_isomorphic(expanded(mutant, nodes, reductions), wanted, same_node, same_edge)
        assert is_same == (space.key(mutant) == space.key(genome)), "another expansion is another network"
    assert len(sizes) > 4

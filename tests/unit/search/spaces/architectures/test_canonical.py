"""Two genomes have one key if their networks are isomorphic, and only then; networkx says which are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations, permutations, product
from typing import cast

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms.isomorphism import categorical_node_match

from orchestray.search.spaces.architectures.canonical import canonical
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.choices import ComposedSpace
from orchestray.search.spaces.architectures.genetic import Genetic
from orchestray.search.spaces.architectures.layer_graph import LayerGraph, Layers
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan
from orchestray.search.spaces.architectures.topology import Topology, TopologyGenome
from orchestray.search.spaces.registry import make_space
from support.spaces import ENUMERATED


def graph_of(plan: Plan) -> nx.DiGraph:
    """Return the plan for networkx: an edge that is there twice has the weight 2."""
    graph = nx.DiGraph()
    graph.add_node(0, label="input")
    for index, step in enumerate(plan.steps):
        graph.add_node(index + 1, label=(step.kind, step.arguments))
        for value in step.inputs:
            count = graph.get_edge_data(value, index + 1, {"count": 0})["count"]
            graph.add_edge(value, index + 1, count=count + 1)
    return graph


def are_isomorphic(a: nx.DiGraph, b: nx.DiGraph) -> bool:
    same_edge: Callable[[dict[str, int], dict[str, int]], bool] = lambda x, y: x["count"] == y["count"]  # noqa: E731
    return bool(nx.is_isomorphic(a, b, categorical_node_match("label", None), same_edge))


@pytest.mark.parametrize("name", ENUMERATED)
def test_keys_are_equal_where_networks_are_isomorphic_and_nowhere_else(name: str) -> None:
    space, arguments = ENUMERATED[name]
    made = cast(ComposedSpace, make_space(space, **arguments))
    classes: dict[str, list[nx.DiGraph]] = defaultdict(list)
    for genome in made.enumerate():
        classes[made.key(genome)].append(graph_of(made.plan(genome)))
    for alike in classes.values():
        assert all(are_isomorphic(alike[0], other) for other in alike[1:])
    for a, b in combinations([alike[0] for alike in classes.values()], 2):
        assert len(a) != len(b) or not are_isomorphic(a, b)
    assert len(classes) < made.count() or name.startswith("chain"), "isomorphic genomes are there to be found"


def layer_graphs() -> Iterator[Layers]:
    """Yield every way to write three layers or fewer, with ids that rise and that fall along the network."""
    kinds = [{"channels": 2, "kernel": 1, "stride": 1}, {"channels": 4, "kernel": 1, "stride": 1}]
    kinds += [{"channels": 2, "kernel": 1, "stride": 2}]
    for depth in range(4):
        for ids in (range(1, depth + 1), range(depth, 0, -1)):
            row = [0, *ids]
            past = [[row[s], row[t]] for t in range(2, depth + 1) for s in range(t - 1)]
            subsets = [skips for count in range(len(past) + 1) for skips in combinations(past, count)]
            for chosen in product(kinds, repeat=depth):
                layers = [{"id": name, **kind} for name, kind in zip(ids, chosen, strict=True)]
                yield from ({"layers": layers, "skips": sorted(skips)} for skips in subsets)


def test_keys_of_layer_graphs_are_equal_where_networks_are_isomorphic_and_nowhere_else() -> None:
    space = LayerGraph()
    classes: dict[str, list[nx.DiGraph]] = defaultdict(list)
    for genome in layer_graphs():
        classes[space.key(genome)].append(graph_of(space.plan(genome)))
    for alike in classes.values():
        assert len(alike) >= 2 or len(alike[0]) == 3, "ids are no part of the network"
        assert all(are_isomorphic(alike[0], other) for other in alike[1:])
    by_size: dict[tuple[int, int], list[nx.DiGraph]] = defaultdict(list)
    for alike in classes.values():
        by_size[len(alike[0]), alike[0].number_of_edges()].append(alike[0])
    for same_size in by_size.values():
        assert not any(are_isomorphic(a, b) for a, b in combinations(same_size, 2))


def topology_graph(space: Topology, genome: TopologyGenome) -> nx.DiGraph:
    """Return what is computed, for networkx; the weight of a connection replaces its count."""
    layers = space.layers(genome)
    graph = nx.DiGraph()
    for number, kind in zip(layers.numbers, layers.kinds, strict=True):
        graph.add_node(number, label=kind if number >= space.first_hidden else number)
    for source, target in layers.connected.tolist():
        graph.add_edge(layers.numbers[source], layers.numbers[target], count=layers.weights[source, target])
    return graph


def renumbered(space: Topology, genome: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
    """Return the same network, whose hidden nodes came up in another order."""
    hidden = [number for number, _ in genome["nodes"]]
    new = dict(zip(hidden, (space.first_hidden + rng.permutation(2 * len(hidden) + 1)).tolist(), strict=False))
    nodes = sorted([new[number], kind] for number, kind in genome["nodes"])
    connections = [[g[0], new.get(g[1], g[1]), new.get(g[2], g[2]), *g[3:]] for g in genome["connections"]]
    return {"nodes": nodes, "connections": [connections[i] for i in rng.permutation(len(connections)).tolist()]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weights", [[1.0], [1.0, -2.0]], ids=str)
def test_keys_of_topologies_are_equal_where_networks_with_their_weights_are_isomorphic_and_nowhere_else(
    weights: list[float], seed: int
) -> None:
    """Draw networks of few different weights: many nodes are alike, and many networks grow to the same."""
    rng, drawn = np.random.default_rng(seed), []
    space = Topology(inputs=1, outputs=2, activations=["sigmoid", "relu"])
    for _ in range(80):
        genome = space.sample(rng)
        for _ in range(int(rng.integers(7))):
            genome = space.with_node(genome, rng) if rng.random() < 0.5 else space.with_connection(genome, rng)
        for gene in genome["connections"]:
            gene[3], gene[4] = float(rng.choice(weights)), bool(rng.random() < 0.8)
        assert space.key(renumbered(space, genome, rng)) == space.key(genome)
        drawn.append((space.key(genome), topology_graph(space, genome)))
        used = [g for g in genome["connections"] if g[4] and drawn[-1][1].has_edge(g[1], g[2])]
        if used:
            used[int(rng.integers(len(used)))][3] = 3.0
            assert space.key(genome) != drawn[-1][0], "weights are a part of the network"
    for (one, first), (other, second) in combinations(drawn, 2):
        assert (one == other) == are_isomorphic(first, second)
    assert len({key for key, _ in drawn}) < len(drawn), "isomorphic networks are there to be found"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_nodes=st.integers(2, 14), num_labels=st.integers(1, 3))
def test_the_form_of_a_graph_is_that_of_any_order_of_its_nodes(seed: int, num_nodes: int, num_labels: int) -> None:
    rng = np.random.default_rng(seed)
    labels = [str(rng.integers(num_labels)) for _ in range(num_nodes)]
    inputs = [[before for before in range(node) if rng.random() < 0.4] for node in range(num_nodes)]
    order = _other_order(inputs, rng)
    place = {node: index for index, node in enumerate(order)}
    moved = [[place[used] for used in inputs[node]] for node in order]
    assert canonical(labels, inputs) == canonical([labels[node] for node in order], moved)


def _other_order(inputs: list[list[int]], rng: np.random.Generator) -> list[int]:
    """Return a random order in which what is used comes first."""
    order: list[int] = []
    while len(order) < len(inputs):
        ready = [n for n in range(len(inputs)) if n not in order and all(used in order for used in inputs[n])]
        order.append(ready[int(rng.integers(len(ready)))])
    return order


def test_graphs_that_refinement_cannot_tell_apart_have_forms_of_their_own() -> None:
    """Compare two triangles with a hexagon, as users of six alike nodes: colours alone see no difference."""
    hexagon = [(i, (i + 1) % 6) for i in range(6)]
    triangles = [(i + 3 * t, (i + 1) % 3 + 3 * t) for t in range(2) for i in range(3)]

    def form(edges: list[tuple[int, int]]) -> object:
        labels = ["input", *["node"] * 6, *["edge"] * 6, "sum"]
        inputs = [[], *[[0]] * 6, *[[a + 1, b + 1] for a, b in edges], list(range(7, 13))]
        return canonical(labels, inputs)

    assert form(hexagon) != form(triangles)
    turned = [((a + 2) % 6, (b + 2) % 6) for a, b in hexagon]
    assert form(hexagon) == form(turned)


def test_many_alike_branches_take_no_time_of_their_factorial() -> None:
    for depth in (1, 2):
        labels = ["input", *["conv"] * (20 * depth), "sum"]
        inputs = [
            [],
            *[[0]] * 20,
            *[[i] for i in range(1, 20 * depth - 19)],
            list(range(20 * depth - 19, 20 * depth + 1)),
        ]
        assert len(canonical(labels, inputs)) == 20 * depth + 2


def test_the_order_of_a_cells_nodes_and_sides_does_not_matter() -> None:
    space = Cell(nodes=3, operations=["conv_1x1", "conv_3x3"], reductions=0, channels=4)
    keys = set()
    nodes = [((0, "conv_1x1"), (1, "conv_3x3")), ((0, "conv_3x3"), (0, "conv_1x1")), ((1, "conv_1x1"), (1, "conv_1x1"))]
    for order in permutations(nodes):
        for flip in (False, True):
            genome = {}
            for index, sides in enumerate(order):
                for side, (source, operation) in zip(("left", "right"), sides[:: -1 if flip else 1], strict=True):
                    genome[f"normal.{index}.{side}.from"] = source
                    genome[f"normal.{index}.{side}.operation"] = operation
            keys.add(space.key(genome))
    assert len(keys) == 1


def test_nodes_that_the_output_does_not_depend_on_do_not_count() -> None:
    space = Genetic(nodes=[4], channels=[4])
    keys = {bits: space.key(space.genome_from([bits])) for bits in ("100000", "000001", "100001")}
    assert keys["100000"] == keys["000001"], "nodes 1-2 and nodes 3-4 alone are the same pair"
    assert keys["100000"] != keys["100001"]
    draft = Draft()
    kept = draft.step("conv", INPUT, channels=4, kernel=3)
    draft.step("conv", kept, channels=8, kernel=3)
    assert [step.kind for step in draft.plan(kept).steps] == ["conv", "global_average", "head"]


def test_a_sum_of_sums_is_one_sum_and_what_has_no_weights_is_computed_once() -> None:
    draft = Draft()
    a, b, c = (draft.step("conv", INPUT, channels=4, kernel=3) for _ in range(3))
    assert draft.add([draft.add([a, b]), c]) == draft.add([a, draft.add([c, b])])
    assert draft.add([a]) == a
    assert draft.step("max_pool", a, kernel=3) == draft.step("max_pool", a, kernel=3)
    assert draft.step("relu", a) != draft.step("relu", b)
    assert draft.steps[draft.add([a, a]) - 1].inputs == (a, a)

"""A drawn network: nothing lies on anything else, every edge leads down, and the page gives the colours."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.search.spaces.architectures.base import BuiltInSpace, Graph, Node
from orchestray.search.spaces.drawing.draw import draw
from orchestray.search.spaces.drawing.layout import Box, lay_out
from orchestray.search.spaces.registry import make_space
from support.spaces import SPACES

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), num_nodes=st.integers(1, 25))
def test_nodes_lie_apart_and_within_the_picture_and_edges_lead_down(seed: int, num_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = [Box(float(rng.integers(18, 120)), float(rng.integers(18, 40))) for _ in range(num_nodes)]
    edges = [(a, b) for b in range(num_nodes) for a in range(b) if rng.random() < 0.25]
    layout = lay_out(boxes, edges)
    for (a, (ax, ay)), (b, (bx, by)) in combinations(enumerate(layout.centres), 2):
        apart_x = abs(ax - bx) >= (boxes[a].width + boxes[b].width) / 2
        apart_y = abs(ay - by) >= (boxes[a].height + boxes[b].height) / 2
        assert apart_x or apart_y
    for box, (x, y) in zip(boxes, layout.centres, strict=True):
        assert box.width / 2 <= x <= layout.width - box.width / 2
        assert box.height / 2 <= y <= layout.height - box.height / 2
    assert all(before[1] <= after[1] for line in layout.lines for before, after in pairwise(line))
    assert all(layout.centres[a][1] < layout.centres[b][1] for a, b in edges)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), num_nodes=st.integers(2, 20))
def test_every_edge_is_drawn_from_its_node_to_its_node(seed: int, num_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = [Box(40.0, 20.0)] * num_nodes
    edges = [(a, b) for b in range(num_nodes) for a in range(b) if rng.random() < 0.3]
    layout = lay_out(boxes, edges)
    lower = {(x, y + 10): node for node, (x, y) in enumerate(layout.centres)}
    upper = {(x, y - 10): node for node, (x, y) in enumerate(layout.centres)}
    goes_to: dict[tuple[float, float], set[tuple[float, float]]] = {}
    for line in layout.lines:
        goes_to.setdefault(line[0], set()).add(line[-1])
    drawn = set()
    for start, node in lower.items():
        ahead = list(goes_to.get(start, ()))
        while ahead:
            point = ahead.pop()
            if point in upper:
                drawn.add((node, upper[point]))
            else:
                ahead += goes_to[point]
    assert drawn == set(edges)


@pytest.mark.parametrize("name", SPACES)
def test_the_picture_of_a_genome_has_all_its_nodes_and_the_colours_of_its_page(name: str) -> None:
    space_name, arguments = SPACES[name]
    space = make_space(space_name, **arguments)
    assert isinstance(space, BuiltInSpace)
    for seed in range(3):
        graph = space.graph(space.sample(np.random.default_rng(seed)))
        written = draw(graph, "a <network>")
        root = ET.fromstring(written)  # noqa: S314 - our own
        titles = [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g")]
        assert titles == [f"{node.name}: {node.label}" for node in graph.nodes]
        assert root.get("aria-label") == "a <network>"
        assert not re.search(r"#[0-9a-f]{3}|rgb|https?://(?!www\.w3\.org/2000/svg)", written)
        words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
        assert all(
            word in words for node in graph.nodes for word in node.label.split() if word not in {"add", "concat"}
        )


def test_an_edge_that_is_there_twice_is_drawn_twice() -> None:
    graph = Graph((Node("input", "input"), Node("sum", "add")), ((0, 1), (0, 1)))
    paths = {path.get("d") for path in ET.fromstring(draw(graph)).iter(f"{SVG}path")}  # noqa: S314
    assert len(paths) == 2


def test_a_picture_in_a_file_has_colours_for_light_and_for_dark() -> None:
    graph = Graph((Node("input", "input"),), ())
    assert "prefers-color-scheme:dark" in draw(graph, is_file=True)
    assert "prefers-color-scheme" not in draw(graph)

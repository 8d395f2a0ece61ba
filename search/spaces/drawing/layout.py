"""A layout for the nodes of a drawn network: layers from top to bottom, narrow enough for a small screen.

Follows K. Sugiyama, S. Tagawa, M. Toda, "Methods for Visual Understanding of Hierarchical System Structures", 1981:
assign layers, order each layer with few crossings (barycentres), then set positions. A value that is used further down
runs there as one line, from which its users branch off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 12
_PLACINGS = 24


@dataclass(frozen=True)
class Box:
    """The size of a node, in pixels."""

    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """The positions of everything, in pixels; (0, 0) is the upper left corner."""

    centres: tuple[tuple[float, float], ...]
    """Centres of the nodes."""
    lines: tuple[tuple[tuple[float, float], ...], ...]
    """Points of each edge: the lower end of a node or line, then where it continues or ends."""
    width: float
    height: float


@dataclass
class _Item:
    """A node, or the position at which a line passes a layer."""

    width: float
    layer: int
    node: int | None
    x: float = 0.0


def lay_out(
    boxes: Sequence[Box],
    edges: Sequence[tuple[int, int]],
    *,
    max_width: float = 330.0,
    gap: float = 10.0,
    layer_gap: float = 22.0,
) -> Layout:
    """Lay out a graph.

    Args:
        boxes: sizes of the nodes, in topological order.
        edges: pairs of nodes; one that is listed twice is drawn twice.
        max_width: maximum total width of a layer, in pixels; nodes that do not fit move further down.
        gap: horizontal gap, in pixels.
        layer_gap: vertical gap between layers, in pixels.
    """
    layers = _layers(boxes, edges, max_width, gap)
    items, links = _with_lines(boxes, edges, layers)
    rows = _ordered(items, links)
    _place(items, links, rows, gap)
    left = min(item.x - item.width / 2 for item in items) - gap
    tops, height = _tops(boxes, layers, layer_gap)
    y = [tops[layers[node]] + _row_height(boxes, layers, layers[node]) / 2 for node in range(len(boxes))]

    def end(index: int, *, is_lower: bool) -> tuple[float, float]:
        item = items[index]
        middle = tops[item.layer] + _row_height(boxes, layers, item.layer) / 2
        half = boxes[item.node].height / 2 if item.node is not None else _row_height(boxes, layers, item.layer) / 2
        return item.x - left, middle + (half if is_lower else -half)

    lines = []
    for a, b in links:
        start, stop = end(a, is_lower=True), end(b, is_lower=False)
        lines.append((start, stop) if items[b].node is not None else (start, stop, end(b, is_lower=True)))
    width = max(item.x + item.width / 2 for item in items) - left + gap
    centres = tuple((items[node].x - left, y[node]) for node in range(len(boxes)))
    return Layout(centres, tuple(lines), width, height)


def _layers(boxes: Sequence[Box], edges: Sequence[tuple[int, int]], max_width: float, gap: float) -> list[int]:
    """Return the layer of each node: below all its inputs, where there is room."""
    taken: dict[int, float] = {}
    layers: list[int] = []
    for node, box in enumerate(boxes):
        layer = 1 + max((layers[a] for a, b in edges if b == node), default=-1)
        while taken.get(layer, 0.0) and taken[layer] + box.width > max_width:
            layer += 1
        taken[layer] = taken.get(layer, 0.0) + box.width + gap
        layers.append(layer)
    for node in range(len(boxes) - 1, 0, -1):  # then as close to their users as there is room
        wide = boxes[node].width
        last = min((layers[b] for a, b in edges if a == node), default=layers[node] + 1) - 1
        fits = [layer for layer in range(layers[node] + 1, last + 1) if taken.get(layer, 0.0) + wide <= max_width]
        if fits:
            taken[layers[node]] -= wide + gap
            layers[node] = fits[-1]
            taken[fits[-1]] = taken.get(fits[-1], 0.0) + wide + gap
    return layers


def _with_lines(
    boxes: Sequence[Box], edges: Sequence[tuple[int, int]], layers: Sequence[int]
) -> tuple[list[_Item], list[tuple[int, int]]]:
    """Return the nodes and the positions where lines pass, and their links to the layer below."""
    items = [_Item(box.width, layers[node], node) for node, box in enumerate(boxes)]
    links: list[tuple[int, int]] = []
    for node in range(len(boxes)):
        users = [b for a, b in edges if a == node]
        passing = node
        for layer in range(layers[node] + 1, max((layers[user] for user in users), default=0) + 1):
            links += [(passing, user) for user in users if layers[user] == layer]
            if any(layers[user] > layer for user in users):
                items.append(_Item(0.0, layer, None))
                links.append((passing, len(items) - 1))
                passing = len(items) - 1
    return items, links


def _ordered(items: Sequence[_Item], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the items of each layer from left to right."""
    rows: list[list[int]] = [[] for _ in range(max(item.layer for item in items) + 1)]
    for index, item in enumerate(items):
        rows[item.layer].append(index)
    above, below = _neighbours(len(items), links)
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        place = {index: at for row in rows for at, index in enumerate(row)}
        for row in rows if down else rows[::-1]:
            row.sort(key=_barycentre(place, above if down else below))
            place.update({index: at for at, index in enumerate(row)})
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _barycentre(place: Mapping[int, int], neighbours: Sequence[Sequence[int]]) -> Callable[[int], float]:
    def of(index: int) -> float:
        around = neighbours[index]
        return sum(place[other] for other in around) / len(around) if around else float(place[index])

    return of


def _crossings(rows: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    count = 0
    for row, after in pairwise(rows):
        place = {index: at for at, index in enumerate(after)}
        ends = [place[to] for index in row for to in sorted(below[index], key=place.__getitem__)]
        count += sum(a > b for at, a in enumerate(ends) for b in ends[at + 1 :])
    return count


def _place(items: Sequence[_Item], links: Sequence[tuple[int, int]], rows: Sequence[Sequence[int]], gap: float) -> None:
    """Set each item's `x` close to those it is linked to, keeping the order of its layer."""
    above, below = _neighbours(len(items), links)
    for row in rows:
        _set_row(items, row, [0.0] * len(row), gap)
    for placing in range(_PLACINGS):
        neighbours = above if placing % 2 == 0 else below
        for row in rows if placing % 2 == 0 else rows[::-1]:
            around = [neighbours[index] or [index] for index in row]
            _set_row(items, row, [sum(items[other].x for other in others) / len(others) for others in around], gap)


def _set_row(items: Sequence[_Item], row: Sequence[int], wanted: Sequence[float], gap: float) -> None:
    """Place a row as close to the wanted positions (least squares) as the gaps allow.

    This is isotonic regression of the differences, by pooling adjacent items that violate the order.
    """
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (items[a].width + items[b].width) / 2 + gap)
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] >= mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    places = [mean for mean, count in pools for _ in range(count)]
    for index, place, offset in zip(row, places, offsets, strict=True):
        items[index].x = place + offset


def _neighbours(count: int, links: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for a, b in links:
        below[a].append(b)
        above[b].append(a)
    return above, below


def _row_height(boxes: Sequence[Box], layers: Sequence[int], layer: int) -> float:
    return max((box.height for box, of_box in zip(boxes, layers, strict=True) if of_box == layer), default=0.0)


def _tops(boxes: Sequence[Box], layers: Sequence[int], layer_gap: float) -> tuple[list[float], float]:
    """Return the top of each layer, and the total height."""
    tops, top = [], layer_gap / 2
    for layer in range(max(layers) + 1):
        tops.append(top)
        top += _row_height(boxes, layers, layer) + layer_gap
    return tops, top - layer_gap / 2

"""Network drawings: self-contained SVG images in the colour of the surrounding text, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from orchestray.search.spaces.architectures.base import Graph
from orchestray.search.spaces.drawing.layout import Box, lay_out

_FONT_PX: Final = 11
_CHARACTER_PX: Final = 6.1
_LINE_PX: Final = 14
_MAX_CHARACTERS: Final = 15
_ROUND: Final = {"add": "+", "concat": "∥"}
"""Nodes drawn as a small circle, with their symbol."""

_FILLS: Final = {
    "input": 0.30,
    "linear": 0.30,
    "conv": 0.16,
    "separable": 0.16,
    "depthwise": 0.16,
    "dense": 0.16,
    "fit": 0.07,
}
"""Opacity of a box by the first word of its label: operations with more weights are darker."""

_STYLE: Final = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def draw(graph: Graph, title: str = "network", *, is_file: bool = False) -> str:
    """Draw a network as an SVG image, its input at the top.

    For networks of the built-in spaces the image is about 400 pixels wide at most; it shrinks with its container.

    Args:
        graph: graph of the network.
        title: text for screen readers.
        is_file: True for a file of its own: it then follows the viewer's light or dark colour scheme.

    Returns:
        A self-contained `<svg>` element.
    """
    texts = [_wrapped(node.label) for node in graph.nodes]
    boxes = [_box(node.label, lines) for node, lines in zip(graph.nodes, texts, strict=True)]
    layout = lay_out(boxes, graph.edges)
    parts = [_curve(points) for points in _apart(layout.lines)]
    for node, lines, box, centre in zip(graph.nodes, texts, boxes, layout.centres, strict=True):
        shape = _shape(node.label, lines, box, centre)
        parts.append(f"<g><title>{escape(node.name)}: {escape(node.label)}</title>{shape}</g>")
    width, height = round(layout.width), round(layout.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" style="max-width:100%;height:auto" color="inherit" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="{_FONT_PX}" text-anchor="middle" '
        f'fill="currentColor" stroke="none"><title>{escape(title)}</title>{_STYLE if is_file else ""}'
        f"{''.join(parts)}</svg>"
    )


def _wrapped(label: str) -> list[str]:
    """Return the label wrapped into lines."""
    if label in _ROUND:
        return [_ROUND[label]]
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _MAX_CHARACTERS:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _box(label: str, lines: Sequence[str]) -> Box:
    if label in _ROUND:
        return Box(18, 18)
    return Box(max(len(line) for line in lines) * _CHARACTER_PX + 16, len(lines) * _LINE_PX + 8)


def _shape(label: str, lines: Sequence[str], box: Box, centre: tuple[float, float]) -> str:
    x, y = centre
    if label in _ROUND:
        outline = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="currentColor" stroke-opacity=".6"/>'
    else:
        filled = _FILLS.get(label.split(maxsplit=1)[0] if label else "", 0.0)
        dashes = "" if filled else ' stroke-dasharray="3 2"'
        outline = (
            f'<rect x="{x - box.width / 2:.1f}" y="{y - box.height / 2:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="6" fill-opacity="{filled}" stroke="currentColor" '
            f'stroke-opacity=".55"{dashes}/>'
        )
    first = y - (len(lines) - 1) * _LINE_PX / 2 + _FONT_PX * 0.36
    words = "".join(
        f'<text x="{x:.1f}" y="{first + at * _LINE_PX:.1f}">{escape(line)}</text>' for at, line in enumerate(lines)
    )
    return outline + words


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return a curve through the points, vertical at each of them and straight where it passes a layer."""
    (x, y), *others = points
    path = f"M{x:.1f} {y:.1f}"
    for to_x, to_y in others:
        middle = (y + to_y) / 2
        path += f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".45"/>'


def _apart(lines: Sequence[tuple[tuple[float, float], ...]]) -> list[tuple[tuple[float, float], ...]]:
    """Shift lines that would coincide, side by side."""
    seen: dict[tuple[tuple[float, float], ...], int] = {}
    moved = []
    for line in lines:
        count = seen[line] = seen.get(line, 0) + 1
        shift = 6.0 * (count // 2) * (1 if count % 2 else -1)
        moved.append(tuple((x + shift, y) for x, y in line))
    return moved

"""Line charts as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 96, 44, 52
_COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b")
_BETWEEN_NAMES = 14
_MOST_TICKS = 7
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:15px;font-weight:600}"
    ".grid{stroke:#d0d7de;stroke-width:1}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.back{fill:#0d1117}}</style>"
)


def svg(lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str, y_label: str) -> str:
    """Return a line chart with a logarithmic y axis; it is self-contained, and dark if the page around it is.

    Args:
        lines: points (x, y) of each line by its name; x >= 0 and y > 0.
        title: text above the chart.
        x_label: text below it.
        y_label: text beside it.
    """
    points = [point for line in lines.values() for point in line] or [(1.0, 1.0)]
    x_end = max(x for x, _ in points) * 1.05 or 1.0
    y_ticks = _log_ticks(min(y for _, y in points), max(y for _, y in points))
    y_low, y_high = math.log(y_ticks[0]), math.log(y_ticks[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2

    def at_x(value: float) -> float:
        return _LEFT + value / x_end * (right - _LEFT)

    def at_y(value: float) -> float:
        return bottom - (math.log(value) - y_low) / (y_high - y_low) * (bottom - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        f'<text x="{middle_x:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {middle_y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    for tick in _ticks(x_end):
        x = at_x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_label(tick)}</text>')
    ends: list[float] = []
    for (name, line), color in zip(lines.items(), itertools.cycle(_COLORS)):
        places = [(at_x(x), at_y(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        for x, y in places[-1:]:
            while any(abs(y - other) < _BETWEEN_NAMES for other in ends):
                y += _BETWEEN_NAMES
            ends.append(y)
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" style="fill:{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(end: float) -> list[float]:
    """Return round numbers from 0 to `end`."""
    base = 10.0 ** math.floor(math.log10(end / _MOST_TICKS))
    step = next(factor * base for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * base * _MOST_TICKS >= end)
    return [number * step for number in range(math.floor(end / step + 1e-9) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    """Return round numbers from below `least` to above `most`, both of which are > 0: at least two."""
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 2)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    low, high = max(value for value in found if value <= least), min(value for value in found if value > most)
    within = [value for value in found if low <= value <= high]
    if len(within) > _MOST_TICKS:
        within = [value for value in within if value in {low, high} or math.log10(value).is_integer()]
    return within


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"

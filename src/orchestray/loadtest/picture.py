"""Charts of the results: as SVG, and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from orchestray.loadtest.axes import Axis, Series, axes, label
from orchestray.loadtest.measure import Measured

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 96, 44, 52
_COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b")
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:15px;font-weight:600}"
    ".grid{stroke:#d0d7de;stroke-width:1}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.back{fill:#0d1117}}</style>"
)
_MARKS = "o*+x#@"
_SHOWN = ("p50", "p99")


def latency_against_rate(points: Sequence[Measured]) -> list[Series]:
    """Return percentiles of latency, ms, over the offered rate, requests/s."""
    return [
        _series(name, [(point.offered_per_s, point.summary()["latency_ms"][name]) for point in points])
        for name in _SHOWN
    ]


def latency_against_time(measured: Measured) -> list[Series]:
    """Return percentiles of latency, ms, of the requests due in each second of one load."""
    seconds = measured.summary()["seconds"]
    return [_series(name, [(one["second"] + 0.5, one[f"{name}_ms"]) for one in seconds]) for name in _SHOWN]


def _series(name: str, points: Sequence[tuple[float, float | None]]) -> Series:
    return Series(name, tuple((x, y) for x, y in points if y is not None and y > 0 and math.isfinite(y)))


def svg(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """Return a line chart with a logarithmic y axis; it is self-contained, and dark if the page around it is."""
    across, up = axes(series)
    middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_grid(across, up),
        f'<text x="{middle_x:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {middle_y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    ends: list[float] = []
    for number, line in enumerate(series):
        lines += _line(line, _COLORS[number % len(_COLORS)], across, up, ends)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.share(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.share(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(across: Axis, up: Axis) -> list[str]:
    lines = []
    for tick in up.ticks():
        y = _y(up, tick)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label(tick)}</text>')
    for tick in across.ticks():
        x = _x(across, tick)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label(tick)}</text>')
    return lines


def _line(line: Series, color: str, across: Axis, up: Axis, ends: list[float]) -> list[str]:
    if not line.points:
        return []
    places = [(_x(across, x), _y(up, y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>']
    drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
    x, y = places[-1]
    while any(abs(y - other) < 14 for other in ends):
        y += 14
    ends.append(y)
    drawn.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" style="fill:{color}">{escape(line.name)}</text>')
    return drawn


def text_chart(series: Sequence[Series], *, x_label: str, y_label: str, width: int = 72, height: int = 14) -> str:
    """Return the same chart in characters, with a different mark for each line of the chart."""
    across, up = axes(series)
    rows = [[" "] * width for _ in range(height)]
    for number, line in enumerate(series):
        for x, y in line.points:
            row = height - 1 - round(up.share(y) * (height - 1))
            rows[row][min(width - 1, round(across.share(x) * (width - 1)))] = _MARKS[number % len(_MARKS)]
    beside = {height - 1 - round(up.share(tick) * (height - 1)): label(tick) for tick in up.ticks()}
    margin = max(map(len, beside.values()), default=1)
    names = "  ".join(f"{_MARKS[number % len(_MARKS)]} {line.name}" for number, line in enumerate(series))
    drawn = [f"{y_label}   {names}"]
    drawn += [f"{beside.get(number, ''):>{margin}} |{''.join(row)}".rstrip() for number, row in enumerate(rows)]
    below = [" "] * (width + 10)
    for tick in across.ticks():
        at = round(across.share(tick) * (width - 1))
        for offset, character in enumerate(label(tick)):
            below[at + offset] = character
    drawn += [f"{' ' * margin} +{'-' * width}", f"{' ' * margin}  {''.join(below).rstrip()}"]
    drawn.append(f"{x_label:>{margin + 2 + width}}")
    return "\n".join(drawn)

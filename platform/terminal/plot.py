"""A curve drawn with braille dots, for terminals and logs."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from orchestray.platform.terminal.format import number

if TYPE_CHECKING:
    from collections.abc import Sequence

# The bits of the 2 x 4 dots of a braille character (Unicode chart U2800), by column, from the bottom up.
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))


def plot(xs: Sequence[float], ys: Sequence[float | None], *, width: int = 64, height: int = 8) -> list[str]:
    """Draw `ys` over `xs` as lines of text, with the extremes on the left and the range of x below.

    Values that are None or not finite are left out. Several values in one column are drawn as their mean, and empty
    columns are interpolated. With fewer than two values the result is an empty list.

    Args:
        xs: ascending positions, for example steps.
        ys: one value for each position.
        width: characters of the curve itself, without the labels.
        height: lines of the curve itself.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
    if len(points) < 2:
        return []
    first_x, last_x = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(2 * width)]
    for x, y in points:
        columns[round((x - first_x) / ((last_x - first_x) or 1) * (2 * width - 1))].append(y)
    means = _without_holes([sum(column) / len(column) if column else None for column in columns])
    low, high = min(means), max(means)
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column, mean in enumerate(means):
        dot = round((mean - low) / ((high - low) or 1) * (4 * height - 1))
        # Steep pieces are joined by a vertical stroke, so that the curve has no gaps.
        nearest = dot if previous is None else previous + (dot > previous) - (dot < previous)
        for filled in range(min(dot, nearest), max(dot, nearest) + 1):
            cells[height - 1 - filled // 4][column // 2] |= _DOTS[column % 2][filled % 4]
        previous = dot
    return _label(cells, number(high), number(low), f"{first_x:,.0f}", f"{last_x:,.0f}")


def _without_holes(values: list[float | None]) -> list[float]:
    """Return the values with missing ones interpolated; the first and the last must be known."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    filled = [known[0][1]]
    for (left, before), (right, after) in itertools.pairwise(known):
        filled += [before + (after - before) * place / (right - left) for place in range(1, right - left + 1)]
    return filled


def _label(cells: list[list[int]], high: str, low: str, first: str, last: str) -> list[str]:
    margin = max(len(high), len(low))
    lines = []
    for row, bits in enumerate(cells):
        label = high if row == 0 else low if row == len(cells) - 1 else ""
        lines.append(f"{label:>{margin}} │" + "".join(chr(0x2800 + cell) for cell in bits))
    width = len(cells[0])
    lines.append(" " * margin + " └" + "─" * width)
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return lines

"""Metrics over steps, stored compactly and thinned for the page."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

MAX_POINTS = 1200


class Series:
    """A metric over the steps, appended to as its log grows."""

    def __init__(self) -> None:
        self.x = array("d")
        self.y = array("d")

    def append(self, x: float, y: float | None) -> None:
        """Add a point; a missing or non-finite value is a gap in the line."""
        self.x.append(x)
        self.y.append(math.nan if y is None else y)

    def last(self) -> float | None:
        """Return the last value, if it is finite."""
        return self.y[-1] if self.y and math.isfinite(self.y[-1]) else None

    def points(self, start: int = 0, max_points: int = MAX_POINTS) -> dict[str, list[Any]]:
        """Return the points from index `start` on, as JSON: {"x", "y"}; null is a gap."""
        return thinned(np.array(self.x[start:]), np.array(self.y[start:]), max_points)


def thinned(x: np.ndarray, y: np.ndarray, max_points: int) -> dict[str, list[Any]]:
    """Thin a line to at most `max_points` points that look the same: each stretch's lowest and highest, and the ends.

    Args:
        x: positions, [points].
        y: values, [points]; a non-finite one is a gap.
        max_points: at least 4.

    Returns:
        {"x": [...], "y": [...]}, with null for a gap; in the order of the points.
    """
    if len(x) > max_points:
        num_stretches = (max_points - 2) // 2
        edges = np.linspace(0, len(x), num_stretches + 1).astype(int)
        is_gap = ~np.isfinite(y)
        stretch = np.repeat(np.arange(num_stretches), np.diff(edges))
        lowest = np.lexsort((np.where(is_gap, np.inf, y), stretch))[edges[:-1]]
        highest = np.lexsort((np.where(is_gap, np.inf, -y), stretch))[edges[:-1]]
        kept = np.unique(np.concatenate([[0], lowest, highest, [len(x) - 1]]))
        x, y = x[kept], y[kept]
    return {
        "x": [int(value) if value == int(value) else value for value in x.tolist()],
        "y": [value if math.isfinite(value) else None for value in y.tolist()],
    }

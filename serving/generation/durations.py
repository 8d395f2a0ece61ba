"""Histograms of durations, with Prometheus buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)


class Durations:
    """A histogram: counts and a sum.

    Args:
        limits_s: upper ends of the buckets, ascending; longer durations are counted beyond them.
    """

    def __init__(self, limits_s: Sequence[float] = SECONDS) -> None:
        self._limits_s = tuple(limits_s)
        self._counts = [0] * (len(self._limits_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._counts[bisect_left(self._limits_s, seconds)] += 1
        self.sum_s += seconds

    @property
    def num(self) -> int:
        return sum(self._counts)

    @property
    def mean_s(self) -> float:
        """Mean duration; 0 before the first."""
        return self.sum_s / self.num if self.num else 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper ends and cumulative counts, ascending; the last one counts all."""
        total, found = 0, []
        for limit_s, count in zip((*self._limits_s, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if limit_s == float("inf") else str(limit_s), float(total)))
        return found

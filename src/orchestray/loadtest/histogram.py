"""A histogram of durations with a bounded relative error over any range.

The idea is that of HdrHistogram (Gil Tene): buckets of constant width within a power of two. Three significant digits
are thus kept from microseconds to hours in a few thousand counters. The sum of two histograms is the histogram of all
their values.
"""

from __future__ import annotations

import math
from typing import Any

_BITS = 11
_HALF = 1 << (_BITS - 1)
_UNITS_PER_S = 1_000_000


class Histogram:
    """Counts of durations: exact to 1 us up to 2 ms, to 0.05 % beyond; mean, minimum and maximum are exact."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num = 0
        self.sum_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0

    def record(self, value_s: float) -> None:
        """Add one duration; a negative one counts as zero."""
        value_s = max(0.0, value_s)
        index = _index(int(value_s * _UNITS_PER_S + 0.5))
        self._counts[index] = self._counts.get(index, 0) + 1
        self.num += 1
        self.sum_s += value_s
        self.min_s = min(self.min_s, value_s)
        self.max_s = max(self.max_s, value_s)

    def add(self, other: Histogram) -> None:
        """Add all values of another histogram."""
        for index, count in other._counts.items():
            self._counts[index] = self._counts.get(index, 0) + count
        self.num += other.num
        self.sum_s += other.sum_s
        self.min_s = min(self.min_s, other.min_s)
        self.max_s = max(self.max_s, other.max_s)

    @property
    def mean_s(self) -> float:
        """Mean in seconds; NaN if nothing was recorded."""
        return self.sum_s / self.num if self.num else math.nan

    def quantile_s(self, share: float) -> float:
        """Return the least duration not exceeded by at least this share of all values; NaN if nothing was recorded."""
        if not self.num:
            return math.nan
        rank = max(1, math.ceil(share * self.num - 1e-9))
        seen = 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= rank:
                return min(self.max_s, max(self.min_s, _middle(index) / _UNITS_PER_S))
        return self.max_s

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        least_s = self.min_s if self.num else None
        return {
            "counts": [[index, self._counts[index]] for index in sorted(self._counts)],
            "sum_s": self.sum_s,
            "min_s": least_s,
            "max_s": self.max_s,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Histogram:
        """Return the histogram from the output of `to_json`."""
        made = cls()
        made._counts = {int(index): int(count) for index, count in value["counts"]}
        made.num = sum(made._counts.values())
        made.sum_s, made.max_s = value["sum_s"], value["max_s"]
        made.min_s = math.inf if value["min_s"] is None else value["min_s"]
        return made


def _index(units: int) -> int:
    shift = max(0, units.bit_length() - _BITS)
    return shift * _HALF + (units >> shift)


def _middle(index: int) -> float:
    shift = max(0, index // _HALF - 1)
    low = (index - shift * _HALF) << shift
    return low + ((1 << shift) - 1) / 2

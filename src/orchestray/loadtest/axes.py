"""The axes of a chart: positions of values, and tick labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_TICKS = (1, 2, 5)


@dataclass(frozen=True)
class Series:
    """A line of a chart: a name, and points (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; logarithmic ones need both > 0."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high one."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 7) -> list[float]:
        """Return round numbers within the axis."""
        if self.log:
            found = [
                factor * 10.0**power
                for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                for factor in _LOG_TICKS
                if self.low <= factor * 10.0**power * (1 + 1e-9) and factor * 10.0**power <= self.high * (1 + 1e-9)
            ]
            decades = [tick for tick in found if math.log10(tick).is_integer()]
            return found if len(found) <= most or len(decades) < 2 else decades
        raw = (self.high - self.low) / most
        base = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * base for factor in _STEPS if factor * base >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axes(series: Sequence[Series]) -> tuple[Axis, Axis]:
    """Return a linear x axis from 0, and a logarithmic y axis to the next of 1, 2, 5 on either side."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points if y > 0]
    high_x = max(xs, default=0.0) * 1.05 or 1.0
    low_y, high_y = min(ys, default=1.0), max(ys, default=10.0)
    low = max(value for value in _around(low_y) if value <= low_y)
    high = min(value for value in _around(high_y) if value > high_y)
    return Axis(0.0, high_x), Axis(low, high, log=True)


def _around(value: float) -> list[float]:
    power = math.floor(math.log10(value))
    return [factor * 10.0**p for p in (power - 1, power, power + 1) for factor in _LOG_TICKS]


def label(value: float) -> str:
    """Return a number as the text of a tick."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"

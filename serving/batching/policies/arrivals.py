"""The pattern of arrivals after a batch was answered, or after a first request to an idle server."""

from __future__ import annotations

import math
from itertools import accumulate

NUM_BINS = 64
_DECAY = 0.97
_MOST_WEIGHT = 1e12
_RIDGE = 0.05


class ArrivalPattern:
    """Arrivals within a horizon after the anchors of one kind: their number, its variance, and their times.

    The number is predicted as alpha + beta x from a size x known at the anchor (of the batch just answered). Clients
    that send their next request when answered have beta near 1; independent arrivals have 0. The times are a histogram
    of offsets. All of it forgets: an anchor weighs 3 % less with every later one.
    """

    def __init__(self) -> None:
        self._bins = [0.0] * NUM_BINS
        self._bins_sum = 0.0
        self._bins_weight = 1.0  # weight of an arrival now: it grows instead of the old ones shrinking
        self._shares: list[float] | None = None
        """Shares at the last anchor; None: not asked for since, which saves time if requests come singly and fast."""
        self.alpha = 0.0
        self.beta = 0.0
        self.variance = 0.0
        """Variance of the number around its prediction, over the remembered anchors."""
        self.num_anchors = 0
        self._weight = self._x = self._xx = self._y = self._xy = self._yy = 0.0

    def add_offset(self, fraction: float) -> None:
        """Count an arrival at this fraction of the horizon after the anchor, in [0, 1)."""
        if self._shares is None:
            self._shares = self._cumulative()  # those of the anchor, so without this arrival
        self._bins[int(fraction * NUM_BINS)] += self._bins_weight
        self._bins_sum += self._bins_weight

    def close(self, size: float, count: int) -> None:
        """End the horizon of an anchor, in which `count` arrivals fell."""
        self.num_anchors += 1
        self._fit(size, count)
        self._bins_weight /= _DECAY
        if self._bins_weight > _MOST_WEIGHT:
            self._bins = [value / self._bins_weight for value in self._bins]
            self._bins_sum /= self._bins_weight
            self._bins_weight = 1.0
        self._shares = None

    @property
    def shares(self) -> list[float]:
        """Shares of the arrivals that come before each bin edge, at the last anchor; from 0 to 1."""
        if self._shares is None:
            self._shares = self._cumulative()
        return self._shares

    @property
    def regularity(self) -> float:
        """Predictability of the number of arrivals: 1 if always as predicted, 0 from half a Poisson variance on."""
        mean = self._y / self._weight if self._weight else 0.0
        return max(0.0, 1.0 - 2.0 * self.variance / mean) if mean > 0.0 else 0.0

    def expected(self, size: float) -> float:
        """Return the expected number of arrivals within the horizon after an anchor of this size."""
        return max(0.0, self.alpha + self.beta * size)

    def _fit(self, x: float, y: float) -> None:
        self._weight = _DECAY * self._weight + 1.0
        self._x = _DECAY * self._x + x
        self._xx = _DECAY * self._xx + x * x
        self._y = _DECAY * self._y + y
        self._xy = _DECAY * self._xy + x * y
        self._yy = _DECAY * self._yy + y * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(0.0, self._xx / self._weight - mean_x * mean_x)
        joint = self._xy / self._weight - mean_x * mean_y
        # The ridge pulls the slope to its last value if all sizes are alike; the line goes through the means.
        ridge = _RIDGE * (1.0 + mean_x)
        slope = (joint + ridge * self.beta) / (spread + ridge)
        self.beta = min(1.0, max(0.0, slope))
        self.alpha = mean_y - self.beta * mean_x
        scatter = self._yy / self._weight - mean_y * mean_y
        left = scatter - 2.0 * self.beta * joint + self.beta * self.beta * spread
        # Corrects for two parameters fitted to what may be few anchors.
        self.variance = max(0.0, left) * self._weight / max(1.0, self._weight - 2.0)

    def _cumulative(self) -> list[float]:
        # A few arrivals say little about when the next one comes, so they are mixed with a uniform distribution.
        even = self._bins_weight / NUM_BINS
        total = self._bins_sum + even * NUM_BINS
        return [running / total for running in accumulate([value + even for value in self._bins], initial=0.0)]


def remaining(expected: float, variance: float, share_passed: float, count: int) -> float:
    """Return the expected further arrivals, after `count` have come and `share_passed` of them usually have.

    The family is that of Panjer (1981), whose members differ in variance / expected. 0: a fixed number (all that is
    missing will come); 1: Poisson (what came says nothing); above 1: bursts (the more came, the more will).
    """
    if expected <= 0.0:
        return 0.0
    ratio = variance / expected
    passed = expected * share_passed
    tail = expected - passed
    if ratio < 1e-6:
        return max(0.0, expected - count)
    if math.isclose(ratio, 1.0, rel_tol=1e-3):
        return tail
    size = expected / (ratio - 1.0)
    if ratio < 1.0 and passed >= -size:
        return 0.0
    return max(0.0, tail * (size + count) / (size + passed))

"""A policy that waits for requests exactly as long as they are expected to be worth it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from orchestray.serving.batching.policies.base import Opportunity, Policy

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


_MIN_ANCHORS = 3
# If clients come back together, leaving one behind costs more than its own second wait: it comes back late the next
# time too, and the slowest requests are those left behind. Values: worth of sharing the batch, in batch overheads.
_WORTH = {"mean": 5.0, "tail": 20.0, "throughput": 5.0}
_ALL = 0.95
_MANY_WINDOWS = 8
_STALE = 2.0
_MOST_LOST = 3.0
"""Loss by waits in vain, in batch overheads for each request that waits, after which what was learned is forgotten."""


@dataclass(slots=True)
class _Window:
    """The time after an anchor in which arrivals are counted."""

    pattern: ArrivalPattern
    began_s: float
    size: float
    count: int = 0


class Adaptive(Policy):
    """A policy that learns what arrives after a batch or after a first request to an idle server, and waits for it.

    A request that comes while the runner waits is spared a batch of its own. It gains what a batch costs regardless of
    its size, less the wait. All requests that wait, and all that come later, lose the wait. The wait with the largest
    expected gain is chosen, 0 if there is none, and chosen again at every arrival.

    For memoryless arrivals the gain is negative for every wait, so nothing waits (which is best for them: see
    `Greedy`). Clients that come back together, and bursts, are waited for. There is nothing to configure: the service
    time and the pattern of arrivals are learned, and forgotten within some dozens of batches.
    """

    is_asked_again = True  # late requests may still come until the horizon is over

    def __init__(self) -> None:
        self._after_batch = ArrivalPattern()
        self._after_idle = ArrivalPattern()
        self._windows: deque[_Window] = deque()
        """Anchors whose horizon is not over; each costs a little at every arrival."""
        self._anchor: _Window | None = None
        self.horizon_s = 0.0
        """Seconds after an anchor in which arrivals are counted; 0 before the first batch."""
        self._balance_s = 0.0
        """Latency that waits have saved, less what they have cost, since it was last above 0."""
        self._num_waiting = 0
        """Requests that wait for others; 0: none does."""
        self._since_s = 0.0
        self._worth_s = 0.0

    def describe(self) -> dict[str, Any]:
        anchors = self._after_batch.num_anchors + self._after_idle.num_anchors
        return {**super().describe(), "learned_from": anchors}

    def arrived(self, now_s: float) -> None:
        self._close_windows(now_s)
        if self._num_waiting:
            self._pay(now_s, self._worth_s)
            self._num_waiting += 1
        for window in self._windows:
            window.count += 1
            window.pattern.add_offset((now_s - window.began_s) / self.horizon_s)
        if not self._windows and self.model.a_s > 0.0:
            self._open(self._after_idle, now_s, 0.0)

    def finished(self, now_s: float, num_items: int) -> None:
        self._num_waiting = 0
        self._close_windows(now_s)
        self._open(self._after_batch, now_s, num_items)

    def _open(self, pattern: ArrivalPattern, now_s: float, size: float) -> None:
        if self.model.a_s <= 0.0:
            return
        if len(self._windows) >= _MANY_WINDOWS and self.horizon_s > _STALE * self.model.a_s:
            self._windows.clear()  # the model became faster: overlapping windows would keep the old horizon for ever
        if not self._windows:
            self.horizon_s = self.model.a_s
        self._anchor = _Window(pattern, now_s, size)
        self._windows.append(self._anchor)

    def _close_windows(self, now_s: float) -> None:
        while self._windows and now_s - self._windows[0].began_s >= self.horizon_s:
            window = self._windows.popleft()
            window.pattern.close(window.size, window.count)

    def _pay(self, now_s: float, saved_s: float) -> None:
        """Enter the wait since the last call in the balance; forget everything if waits have cost too much.

        This is Page's test for a change ("Continuous inspection schemes", 1954), with the loss itself as its statistic:
        a policy that has lost more than it may goes on as a new one.
        """
        cost_s = self._num_waiting * (now_s - self._since_s)
        self._balance_s = min(0.0, self._balance_s + saved_s - cost_s)
        self._since_s = now_s
        if self._balance_s < -_MOST_LOST * self.model.a_s * self._num_waiting:
            self._balance_s = 0.0
            self._after_batch, self._after_idle = ArrivalPattern(), ArrivalPattern()
            self._windows.clear()

    def wait_s(self, opportunity: Opportunity) -> float:
        if self._num_waiting:
            self._pay(opportunity.now_s, 0.0)
        wait_s = self._best_wait_s(opportunity)
        is_paid = wait_s > 0.0 and self.objective != "throughput"
        self._num_waiting, self._since_s = opportunity.num_queued if is_paid else 0, opportunity.now_s
        return wait_s

    def _best_wait_s(self, opportunity: Opportunity) -> float:
        anchor = self._anchor
        self._close_windows(opportunity.now_s)
        if anchor is None or not self._windows or anchor is not self._windows[-1]:
            return 0.0
        pattern = anchor.pattern
        if pattern.num_anchors < _MIN_ANCHORS or opportunity.num_idle > 1:
            return 0.0
        expected = pattern.expected(anchor.size)
        if expected <= 0.0:
            return 0.0
        elapsed_s = opportunity.now_s - anchor.began_s
        shares = pattern.shares
        position = elapsed_s / self.horizon_s * NUM_BINS
        bin_now = int(position)
        share_now = shares[bin_now] + (position - bin_now) * (shares[bin_now + 1] - shares[bin_now])
        left = 1.0 - share_now
        if left <= 1e-9:
            return 0.0
        total = remaining(expected, pattern.variance, share_now, anchor.count)
        if self.objective == "throughput":
            return self._filling_wait_s(shares, share_now, total, elapsed_s, opportunity)
        return self._gainful_wait_s(pattern, share_now, total, elapsed_s, opportunity)

    def _gainful_wait_s(
        self, pattern: ArrivalPattern, share_now: float, total: float, elapsed_s: float, opportunity: Opportunity
    ) -> float:
        """Return the wait with the largest expected gain, in seconds of latency summed over requests."""
        shares, left = pattern.shares, 1.0 - share_now
        num_queued = opportunity.num_queued
        room = self.max_batch_size - num_queued
        overhead_s = min(self.model.a_s, opportunity.next_free_s)
        returning = pattern.regularity
        worth_s = overhead_s * (1.0 + (_WORTH[self.objective] - 1.0) * returning)
        longer_s = (1.0 - returning) * self.model.c_s * num_queued
        each_s, num_losing = worth_s - longer_s, num_queued + total
        self._worth_s = each_s
        if each_s <= 0.0:
            return 0.0
        most_s = min(total * (shares[NUM_BINS] - share_now) / left, room) * each_s
        best_gain, best_s = 0.0, 0.0
        for edge in range(int(elapsed_s / self.horizon_s * NUM_BINS) + 1, NUM_BINS + 1):
            wait_s = edge * self.horizon_s / NUM_BINS - elapsed_s
            lost_s = num_losing * wait_s
            if most_s - lost_s <= best_gain:
                break  # even if all came, neither this wait nor a longer one would be worth it
            gain = min(total * (shares[edge] - share_now) / left, room) * each_s - lost_s
            if gain > best_gain:
                best_gain, best_s = gain, wait_s
        return best_s

    def _filling_wait_s(
        self, shares: list[float], share_now: float, total: float, elapsed_s: float, opportunity: Opportunity
    ) -> float:
        """Return the wait until nearly all expected requests came, or the oldest waited the time of a full batch."""
        if total < 0.5:
            return 0.0
        wanted = share_now + _ALL * (1.0 - share_now) * min(1.0, (self.max_batch_size - opportunity.num_queued) / total)
        edge = next((index for index, share in enumerate(shares) if share >= wanted), NUM_BINS)
        patience_s = opportunity.oldest_s + self.model.predict_s(self.max_batch_size) - opportunity.now_s
        return max(0.0, min(edge * self.horizon_s / NUM_BINS - elapsed_s, patience_s))

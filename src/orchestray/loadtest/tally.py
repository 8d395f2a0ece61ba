"""A record of the requests of one load, and statistics of them."""

from __future__ import annotations

import functools
import math
from array import array
from collections import Counter
from typing import Any

import numpy as np

Outcome = int | str
"""Status of an answer, or a short reason why there is none."""

_Values = np.ndarray[Any, np.dtype[np.float64]]


def _is_good(status: Any) -> Any:
    return (status >= 200) & (status < 300)


class Latencies:
    """Statistics of durations in seconds, exact; NaN if there are none."""

    def __init__(self, values_s: _Values) -> None:
        self._ascending_s = np.sort(values_s)
        self.num = len(values_s)
        self.sum_s = float(values_s.sum())
        self.mean_s = self.sum_s / self.num if self.num else math.nan
        self.min_s, self.max_s = self.quantile_s(0.0), self.quantile_s(1.0)

    def quantile_s(self, share: float) -> float:
        """Return the least duration not exceeded by at least this share of all values."""
        rank = max(1, math.ceil(share * self.num - 1e-9))
        return float(self._ascending_s[rank - 1]) if self.num else math.nan


class Tally:
    """A record of the requests that were due in [warm_up_s, end_s); times are seconds since the load began.

    A latency counts from the time a request was due, not from when it could be sent. A stall of the server thus counts
    for all requests that were due meanwhile ("coordinated omission", Gil Tene).

    It takes 32 bytes a request. Statistics are made when they are first read, which has to be after the load.
    """

    def __init__(self, warm_up_s: float, end_s: float, deadline_s: float | None = None) -> None:
        self.warm_up_s, self.end_s, self.deadline_s = warm_up_s, end_s, deadline_s
        self._recorded = array("d")
        """Times at which each request was due, sent and answered, and its status; 0: not answered."""
        self.statuses: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()

    def record(self, due_s: float, sent_s: float, ended_s: float, outcome: Outcome) -> None:
        """Add a request that has ended."""
        status = 0 if isinstance(outcome, str) else outcome
        self._recorded.extend((due_s, max(due_s, sent_s), ended_s, status))
        if not self.warm_up_s <= due_s < self.end_s:
            return
        if isinstance(outcome, str):
            self.errors[outcome] += 1
        else:
            self.statuses[outcome] += 1

    def add(self, other: Tally) -> None:
        """Add the requests of another process in the same time."""
        self._recorded += other._recorded
        self.statuses += other.statuses
        self.errors += other.errors

    @functools.cached_property
    def _all(self) -> _Values:
        """Times at which each request was due, sent and answered, and its status; ordered by when it was due."""
        rows = np.array(self._recorded).reshape(-1, 4)
        return rows[np.argsort(rows[:, 0])].T

    @functools.cached_property
    def _counted(self) -> _Values:
        first, end = np.searchsorted(self._all[0], (self.warm_up_s, self.end_s))
        return self._all[:, first:end]

    @property
    def num_offered(self) -> int:
        return len(self._counted[0])

    @functools.cached_property
    def latency(self) -> Latencies:
        """Latencies of answers with status 2xx."""
        return self.between(self.warm_up_s, self.end_s)

    @functools.cached_property
    def refused(self) -> Latencies:
        """Latencies of answers with another status."""
        due_s, _, ended_s, status = self._counted
        return Latencies((ended_s - due_s)[(status > 0) & ~_is_good(status)])

    @functools.cached_property
    def lag(self) -> Latencies:
        """Seconds from when a request was due until this program sent it: the lateness of the load generator itself."""
        return Latencies(self._counted[1] - self._counted[0])

    @property
    def num_in_time(self) -> int:
        """Number of requests answered with 2xx within the deadline."""
        due_s, _, ended_s, status = self._counted
        return int(np.sum(_is_good(status) & (ended_s - due_s <= (self.deadline_s or math.inf))))

    @property
    def num_answered_within(self) -> int:
        """Number of 2xx answers that came in the measured time, whenever they were due."""
        _, _, ended_s, status = self._all
        return int(np.sum(_is_good(status) & (self.warm_up_s <= ended_s) & (ended_s < self.end_s)))

    def between(self, begin_s: float, end_s: float) -> Latencies:
        """Return the latencies of 2xx answers to requests due in [begin_s, end_s)."""
        first, end = np.searchsorted(self._counted[0], (begin_s, end_s))
        due_s, _, ended_s, status = self._counted[:, first:end]
        return Latencies((ended_s - due_s)[_is_good(status)])

    @property
    def seconds(self) -> dict[int, tuple[Latencies, int]]:
        """Latencies of 2xx answers, and the number of requests, of each second in which any was due."""
        numbers, counts = np.unique(self._counted[0].astype(int), return_counts=True)
        found = zip(numbers.tolist(), counts.tolist(), strict=True)
        return {number: (self.between(number, number + 1), count) for number, count in found}

"""The outcomes of the requests of one load, counted as they are answered, and summed over processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from orchestray.loadtest.histogram import Histogram

PARTS_A_SECOND = 4

Outcome = int | str
"""Status of an answer, or a short reason why there is none."""


@dataclass
class Part:
    """The outcomes of the requests that were due in one part of the load."""

    latency: Histogram = field(default_factory=Histogram)
    num_failed: int = 0

    def add(self, other: Part) -> None:
        """Add the counts of another part, or of another process."""
        self.latency.add(other.latency)
        self.num_failed += other.num_failed


@dataclass
class Tally:
    """A count of the requests that were due in [warm_up_s, end_s); times are seconds since the load began.

    A latency counts from the time a request was due, not from when it could be sent. A stall of the server thus counts
    for all requests that were due meanwhile ("coordinated omission", Gil Tene).
    """

    warm_up_s: float
    end_s: float
    deadline_s: float | None = None
    latency: Histogram = field(default_factory=Histogram)
    """Latencies of answers with status 2xx."""
    refused: Histogram = field(default_factory=Histogram)
    """Latencies of answers with another status."""
    lag: Histogram = field(default_factory=Histogram)
    """Seconds from when a request was due until this program sent it: the lateness of the load generator itself."""
    statuses: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_offered: int = 0
    num_in_time: int = 0
    """Number of requests answered with 2xx within the deadline."""
    num_answered_within: int = 0
    """Number of 2xx answers that came in the measured time, whenever they were due."""
    parts: dict[int, Part] = field(default_factory=dict)
    """Counts by the quarter of a second in which requests were due, if any were."""

    @property
    def seconds(self) -> dict[int, Part]:
        """Counts by second, in order; seconds in which no request was due are left out."""
        found: dict[int, Part] = {}
        for number, part in sorted(self.parts.items()):
            found.setdefault(number // PARTS_A_SECOND, Part()).add(part)
        return found

    def between(self, begin_s: float, end_s: float) -> Part:
        """Return the counts of requests due in [begin_s, end_s), both in whole quarters of a second."""
        whole = Part()
        for number in range(round(begin_s * PARTS_A_SECOND), round(end_s * PARTS_A_SECOND)):
            if number in self.parts:
                whole.add(self.parts[number])
        return whole

    @property
    def duration_s(self) -> float:
        """Measured seconds."""
        return self.end_s - self.warm_up_s

    def _counts(self, due_s: float) -> bool:
        return self.warm_up_s <= due_s < self.end_s

    def offer(self, due_s: float, now_s: float) -> None:
        """Count a request that was due at `due_s` and is sent now."""
        if self._counts(due_s):
            self.num_offered += 1
            self.lag.record(now_s - due_s)

    def answer(self, due_s: float, now_s: float, outcome: Outcome) -> None:
        """Count the outcome of a request."""
        good = isinstance(outcome, int) and 200 <= outcome < 300
        if good and self._counts(now_s):
            self.num_answered_within += 1
        if not self._counts(due_s):
            return
        number = int(due_s * PARTS_A_SECOND)
        part = self.parts.get(number)
        if part is None:
            part = self.parts[number] = Part()
        latency_s = now_s - due_s
        if isinstance(outcome, str):
            self.errors[outcome] += 1
        else:
            self.statuses[outcome] += 1
        if good:
            self.latency.record(latency_s)
            part.latency.record(latency_s)
            self.num_in_time += self.deadline_s is None or latency_s <= self.deadline_s
        else:
            part.num_failed += 1
            if isinstance(outcome, int):
                self.refused.record(latency_s)

    def add(self, other: Tally) -> None:
        """Add the counts of another process for the same time."""
        for mine, theirs in (
            (self.latency, other.latency),
            (self.refused, other.refused),
            (self.lag, other.lag),
        ):
            mine.add(theirs)
        self.statuses += other.statuses
        self.errors += other.errors
        self.num_offered += other.num_offered
        self.num_in_time += other.num_in_time
        self.num_answered_within += other.num_answered_within
        for number, part in other.parts.items():
            self.parts.setdefault(number, Part()).add(part)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {
            "warm_up_s": self.warm_up_s,
            "end_s": self.end_s,
            "deadline_s": self.deadline_s,
            "latency": self.latency.to_json(),
            "refused": self.refused.to_json(),
            "lag": self.lag.to_json(),
            "statuses": sorted(self.statuses.items()),
            "errors": sorted(self.errors.items()),
            "num_offered": self.num_offered,
            "num_in_time": self.num_in_time,
            "num_answered_within": self.num_answered_within,
            "parts": [[number, part.latency.to_json(), part.num_failed] for number, part in self.parts.items()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return the tally from the output of `to_json`."""
        return cls(
            **{
                **value,
                **{name: Histogram.from_json(value[name]) for name in ("latency", "refused", "lag")},
                "statuses": Counter(dict(value["statuses"])),
                "errors": Counter(dict(value["errors"])),
                "parts": {
                    number: Part(Histogram.from_json(latency), num_failed)
                    for number, latency, num_failed in value["parts"]
                },
            }
        )

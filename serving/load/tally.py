"""What became of the requests of one load: counted as they are answered, and added up over processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from orchestray.serving.load.histogram import Histogram

PARTS_A_SECOND = 4

Outcome = int | str
"""The status of an answer, or in a word or two why there is none."""


@dataclass
class Part:
    """What was due within some time of the load."""

    latency: Histogram = field(default_factory=Histogram)
    num_failed: int = 0

    def add(self, other: Part) -> None:
        """Add what was due at another time, or was counted by another process."""
        self.latency.add(other.latency)
        self.num_failed += other.num_failed


@dataclass
class Tally:
    """Counts requests that were due in [warm_up_s, end_s); times are seconds since the load began.

    A latency counts from the moment a request was due, not from when it could be sent: a stall of the server meets all
    that should have arrived meanwhile, as it would have met their users ("coordinated omission", Gil Tene).
    """

    warm_up_s: float
    end_s: float
    deadline_s: float | None = None
    latency: Histogram = field(default_factory=Histogram)
    """Of answers with a status of 2xx."""
    refused: Histogram = field(default_factory=Histogram)
    """Of answers with another status."""
    lag: Histogram = field(default_factory=Histogram)
    """From when a request was due to when this program came to send it: how late the load generator itself was."""
    statuses: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_offered: int = 0
    num_in_time: int = 0
    """Answered with 2xx within the deadline."""
    num_answered_within: int = 0
    """Answers with 2xx that came in the measured time, whenever they were due."""
    parts: dict[int, Part] = field(default_factory=dict)
    """By quarters of a second, in which something was due."""

    @property
    def seconds(self) -> dict[int, Part]:
        """Second by second, in order; without those in which nothing was due."""
        found: dict[int, Part] = {}
        for number, part in sorted(self.parts.items()):
            found.setdefault(number // PARTS_A_SECOND, Part()).add(part)
        return found

    def between(self, begin_s: float, end_s: float) -> Part:
        """What was due in [begin_s, end_s), both in whole quarters of a second."""
        whole = Part()
        for number in range(round(begin_s * PARTS_A_SECOND), round(end_s * PARTS_A_SECOND)):
            if number in self.parts:
                whole.add(self.parts[number])
        return whole

    @property
    def duration_s(self) -> float:
        """Of what is measured."""
        return self.end_s - self.warm_up_s

    def _counts(self, due_s: float) -> bool:
        return self.warm_up_s <= due_s < self.end_s

    def offer(self, due_s: float, now_s: float) -> None:
        """A request is sent now that was due then."""
        if self._counts(due_s):
            self.num_offered += 1
            self.lag.record(now_s - due_s)

    def answer(self, due_s: float, now_s: float, outcome: Outcome) -> None:
        """A request came to its end."""
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
        """Add what another process counted at the same time."""
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
        """What `from_json` takes."""
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
        """The tally that was written."""
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

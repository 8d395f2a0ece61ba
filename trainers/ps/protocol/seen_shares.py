"""The set of shares that a server has applied, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A share of a batch."""

    step: int
    """Number of the batch, from 1."""
    share: int
    """Index of the share in its batch, from 0, in the order of its samples."""
    num_samples: int
    batch_samples: int


class SeenShares:
    """A set of shares.

    A complete batch is remembered as a whole, and all batches up to the first incomplete one as one number.
    """

    def __init__(self, complete_to: int = 0) -> None:
        """
        Args:
            complete_to: step up to which all steps are complete.
        """
        self._complete_to = complete_to
        self._complete: set[int] = set()
        self._shares: dict[int, set[int]] = {}
        self._samples: dict[int, int] = {}

    def __contains__(self, part: Part) -> bool:
        return self.is_complete(part.step) or part.share in self._shares.get(part.step, ())

    def add(self, part: Part) -> None:
        self._shares.setdefault(part.step, set()).add(part.share)
        self._samples[part.step] = self._samples.get(part.step, 0) + part.num_samples
        if self._samples[part.step] >= part.batch_samples:
            del self._shares[part.step], self._samples[part.step]
            self._complete.add(part.step)
            while self._complete_to + 1 in self._complete:
                self._complete_to += 1
                self._complete.remove(self._complete_to)

    def is_complete(self, step: int) -> bool:
        return step <= self._complete_to or step in self._complete

    @property
    def num_remembered(self) -> int:
        """Number of entries held in memory."""
        return len(self._complete) + sum(len(shares) for shares in self._shares.values())

    def to_json(self) -> dict[str, Any]:
        open_steps = [[step, self._samples[step], sorted(shares)] for step, shares in sorted(self._shares.items())]
        return {"complete_to": self._complete_to, "complete": sorted(self._complete), "open": open_steps}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SeenShares:
        made = cls(int(value["complete_to"]))
        made._complete = set(value["complete"])
        made._shares = {step: set(shares) for step, _, shares in value["open"]}
        made._samples = {step: samples for step, samples, _ in value["open"]}
        return made

"""The set of shares that a server has applied, in memory that does not grow with the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestray.trainers.ps.protocol.json_state import Numbers


class Part(NamedTuple):
    """A share of a batch."""

    step: int
    """Number of the batch, from 1."""
    share: int
    """Index of the share in its batch, from 0, in the order of its samples."""
    num_samples: int
    batch_samples: int


@dataclass
class SeenShares:
    """A set of shares.

    A complete batch is remembered as a whole, and all batches up to the first incomplete one as one number.
    """

    complete_to: int = 0
    """Step up to which all steps are complete."""
    _complete: Numbers = field(default_factory=set)
    _shares: dict[int, Numbers] = field(default_factory=dict)
    _samples: dict[int, int] = field(default_factory=dict)

    def __contains__(self, part: Part) -> bool:
        return self.is_complete(part.step) or part.share in self._shares.get(part.step, ())

    def add(self, part: Part) -> None:
        self._shares.setdefault(part.step, set()).add(part.share)
        self._samples[part.step] = self._samples.get(part.step, 0) + part.num_samples
        if self._samples[part.step] >= part.batch_samples:
            del self._shares[part.step], self._samples[part.step]
            self._complete.add(part.step)
            while self.complete_to + 1 in self._complete:
                self.complete_to += 1
                self._complete.remove(self.complete_to)

    def is_complete(self, step: int) -> bool:
        return step <= self.complete_to or step in self._complete

    @property
    def num_remembered(self) -> int:
        """Number of entries held in memory."""
        return len(self._complete) + sum(len(shares) for shares in self._shares.values())

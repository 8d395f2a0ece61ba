"""What a method with a model remembers of the trials that ended, as arrays that grow."""

from __future__ import annotations

import numpy as np

from orchestray.search.methods.hyper.encoding import Encoded, stack
from orchestray.search.spaces.base import Genome

_BLOCK = 64


class History:
    """The points of the trials that ended, and their scores; NaN for those that failed."""

    def __init__(self, num_units: int, num_choices: int) -> None:
        self._full = Encoded(
            np.empty((0, num_units)), np.empty((0, num_choices), dtype=np.int64), np.empty((0, 0), dtype=np.int64)
        )
        self._recent: list[Encoded] = []
        self._scores: list[float] = []
        self.genomes: list[Genome] = []

    def __len__(self) -> int:
        return len(self._scores)

    def add(self, point: Encoded, genome: Genome, score: float | None) -> None:
        """Add one point, [1, ...]."""
        self._recent.append(point)
        self.genomes.append(genome)
        self._scores.append(np.nan if score is None else score)
        if len(self._recent) >= _BLOCK:
            self._settle()

    def points(self) -> Encoded:
        """All points, in the order they were added."""
        self._settle()
        return self._full

    def _settle(self) -> None:
        if self._recent:
            self._full = stack([self._full, *self._recent])
            self._recent = []

    def scores(self) -> np.ndarray:
        """[n]; a failed trial has the worst score there is. Infinities are drawn to the nearest finite score."""
        scores = np.array(self._scores)
        finite = scores[np.isfinite(scores)]
        if not len(finite):
            return np.zeros(len(scores))
        filled: np.ndarray = np.clip(np.nan_to_num(scores, nan=finite.min()), finite.min(), finite.max())
        return filled

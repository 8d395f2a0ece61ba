"""The record of ended trials for methods with a model, as arrays that grow."""

from __future__ import annotations

import numpy as np

from orchestray.search.methods.hyper.encoding import ABSENT, Encoded, widened
from orchestray.search.spaces.architectures.base import Genome

_FIRST_ROWS = 64


class History:
    """The points of the ended trials, and their scores; NaN for failed ones."""

    def __init__(self, num_units: int, num_choices: int) -> None:
        self._rows = Encoded(
            np.empty((_FIRST_ROWS, num_units)),
            np.empty((_FIRST_ROWS, num_choices), dtype=np.int64),
            np.full((_FIRST_ROWS, 0), ABSENT),
        )
        """Points, with spare rows: the arrays double when they are full."""
        self._scores: list[float] = []
        self._violations: list[tuple[float, ...]] = []
        self.genomes: list[Genome] = []

    def __len__(self) -> int:
        return len(self._scores)

    def add(self, point: Encoded, genome: Genome, score: float | None, violations: tuple[float, ...] = ()) -> None:
        """Add a trial.

        Args:
            point: encoded point, a batch of one.
            genome: its genome.
            score: its score; None: it failed.
            violations: by how much it breaks each bound; empty without bounds, and for failed trials.
        """
        row, width = len(self), point.genes.shape[1]
        if row == len(self._rows):
            self._rows = Encoded(*(_doubled(part) for part in (self._rows.units, self._rows.choices, self._rows.genes)))
        if width > self._rows.genes.shape[1]:
            self._rows = Encoded(self._rows.units, self._rows.choices, widened(self._rows.genes, width))
        self._rows.units[row], self._rows.choices[row] = point.units[0], point.choices[0]
        self._rows.genes[row, :width] = point.genes[0]
        self.genomes.append(genome)
        self._scores.append(np.nan if score is None else score)
        self._violations.append(violations)

    def points(self) -> Encoded:
        """Return all points in the order of addition; a read-only view."""
        return self._rows[: len(self)]

    @property
    def has_bounds(self) -> bool:
        """True if a feasible trial keeps bounds."""
        return any(self._violations)

    def violations(self) -> np.ndarray:
        """Return the violation of each bound, [n, num_bounds]; infinite for failed trials."""
        width = max(map(len, self._violations), default=0)
        return np.array([one or (np.inf,) * width for one in self._violations]).reshape(len(self), width)

    def total_violations(self) -> np.ndarray:
        """Return the sum of the bounds that each trial breaks, [n]; 0 for feasible ones."""
        total: np.ndarray = np.maximum(self.violations(), 0.0).sum(1)
        return total

    def best_first(self) -> np.ndarray:
        """Return the indices of the trials, the best first: feasible ones by score, the others by violation."""
        return np.lexsort((-self.scores(), self.total_violations()))

    def scores(self) -> np.ndarray:
        """Return the scores, [n]; failed trials have the worst score, infinities the nearest finite score."""
        scores = np.array(self._scores)
        finite = scores[np.isfinite(scores)]
        if not len(finite):
            return np.zeros(len(scores))
        filled: np.ndarray = np.clip(np.nan_to_num(scores, nan=finite.min()), finite.min(), finite.max())
        return filled


def _doubled(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.full_like(rows, ABSENT)])

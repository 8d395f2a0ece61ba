"""The record of ended trials for methods with a model, as arrays that grow."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np

from orchestray.search.methods.fronts import crowding_distances
from orchestray.search.methods.hyper.encoding import ABSENT, Encoded, widened
from orchestray.search.spaces.architectures.base import Genome

_FIRST_ROWS = 64
_MAX_COMPARED = 64
"""Most trials of a front that the others are compared with: those with the most room."""


def _kept(compute: Callable[[History], np.ndarray]) -> Callable[[History], np.ndarray]:
    """Compute an array once until another trial is added: it takes milliseconds after thousands of trials."""

    @wraps(compute)
    def kept(history: History) -> np.ndarray:
        if compute.__name__ not in history._derived:
            history._derived[compute.__name__] = compute(history)
        return history._derived[compute.__name__]

    return kept


class History:
    """The points of the ended trials, and their scores."""

    def __init__(self, num_units: int, num_choices: int) -> None:
        self._rows = Encoded(
            np.empty((_FIRST_ROWS, num_units)),
            np.empty((_FIRST_ROWS, num_choices), dtype=np.int64),
            np.full((_FIRST_ROWS, 0), ABSENT),
        )
        """Points, with spare rows: the arrays double when they are full."""
        self._scores: list[tuple[float, ...]] = []
        self._front: list[int] = []
        """Feasible trials that no other dominates."""
        self._violations: list[tuple[float, ...]] = []
        self.genomes: list[Genome] = []
        self._derived: dict[str, np.ndarray] = {}
        """Scores and violations as arrays, until another trial is added."""

    def __len__(self) -> int:
        return len(self._scores)

    def add(
        self, point: Encoded, genome: Genome, scores: tuple[float, ...], violations: tuple[float, ...] = ()
    ) -> None:
        """Add a trial.

        Args:
            point: encoded point, a batch of one.
            genome: its genome.
            scores: a score for each objective; empty: it failed, or was not trained as it breaks a bound.
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
        self._scores.append(scores)
        self._violations.append(violations)
        self._derived.clear()
        if len(scores) > 1 and max(violations, default=0.0) <= 0:
            before = [row for row in self._front if len(self._scores[row]) == len(scores)]
            others, mine = np.array([self._scores[row] for row in before]).reshape(-1, len(scores)), np.array(scores)
            if not np.all(others >= mine, axis=1).any():
                stays = ~np.all(others <= mine, axis=1)
                self._front = [row for row, does in zip(before, stays, strict=True) if does] + [len(self) - 1]

    def points(self) -> Encoded:
        """Return all points in the order of addition; a read-only view."""
        return self._rows[: len(self)]

    @_kept
    def judged(self) -> np.ndarray:
        """Return the indices of the trials whose scores say something: all but those that were not trained, rising.

        Those that failed are among them, with the worst scores.
        """
        rows = zip(self._scores, self._violations, strict=True)
        return np.flatnonzero([bool(scores) or not violations for scores, violations in rows])

    @property
    def has_bounds(self) -> bool:
        """True if a feasible trial keeps bounds."""
        return any(self._violations)

    @_kept
    def violations(self) -> np.ndarray:
        """Return the violation of each bound, [n, num_bounds]; infinite for failed trials."""
        width = max(map(len, self._violations), default=0)
        return np.array([one or (np.inf,) * width for one in self._violations]).reshape(len(self), width)

    @_kept
    def total_violations(self) -> np.ndarray:
        """Return the sum of the bounds that each trial breaks, [n]; 0 for feasible ones."""
        total: np.ndarray = np.maximum(self.violations(), 0.0).sum(1)
        return total

    @_kept
    def best_first(self) -> np.ndarray:
        """Return the indices of the trials, the best first: feasible ones by score, the others by violation."""
        return np.lexsort((-self.scores(), self.total_violations()))

    @property
    def num_objectives(self) -> int:
        """Number of scores of a trial, at least 1."""
        return max(map(len, self._scores), default=1) or 1

    @_kept
    def objectives(self) -> np.ndarray:
        """Return the scores, [n, num_objectives]; failed trials have the worst of each, infinities the nearest finite.

        Trials of earlier searches may have another number of scores; they count as failed.
        """
        width = self.num_objectives
        rows = np.array([one if len(one) == width else (np.nan,) * width for one in self._scores]).reshape(-1, width)
        for column in rows.T:
            finite = column[np.isfinite(column)]
            low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
            column[:] = np.clip(np.nan_to_num(column, nan=low), low, high)
        return rows

    @_kept
    def scores(self) -> np.ndarray:
        """Return one score of each trial, [n]: that of the only objective, or a standing among all trials.

        With several, trials on the front stand above the others, by the room that they have there. The others stand by
        how far all their scores would have to rise to be dominated no longer, in ranges of the front.
        That is the additive epsilon indicator of Zitzler et al. (2003).
        """
        rows = self.objectives()
        if rows.shape[1] == 1 or not self._front:
            only: np.ndarray = rows[:, 0]
            return only
        room = crowding_distances(rows[self._front])
        roomy = np.array(self._front)[np.argsort(-room, kind="stable")[:_MAX_COMPARED]]
        spread = np.ptp(rows[roomy], axis=0)
        spread = np.where(spread > 0, spread, np.maximum(rows.std(0), 1e-300))
        standing: np.ndarray = -np.maximum(((rows[roomy] - rows[:, None]) / spread).max(2).min(1), 0.0)
        standing[self._front] = room / (1 + room) / 2
        return standing


def _doubled(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.full_like(rows, ABSENT)])

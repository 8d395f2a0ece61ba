"""Expected improvement under a Gaussian process, maximised over numbers, choices and genomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import ThreadpoolController

from orchestray.search.methods.base import rng_of
from orchestray.search.methods.hyper.acquisition import Acquisition
from orchestray.search.methods.hyper.encoding import Encoded, Encoder, stack
from orchestray.search.methods.hyper.feasibility import Feasibility
from orchestray.search.methods.hyper.gaussian_process import Kernel, Posterior, fit
from orchestray.search.methods.hyper.improvement import Best, Front
from orchestray.search.spaces.architectures.base import Genome

if TYPE_CHECKING:
    from orchestray.search.methods.hyper.history import History
    from orchestray.search.spaces.architectures.base import ArchitectureSpace

_MAX_MODELLED = 160
"""Most trials that the model knows, so that the cost of a proposal is bounded: the best, and a sample."""
_MAX_PENDING = 64
"""Most running trials that it knows, the newest: successive halving soon holds thousands."""
_MAX_FITTED = 128
"""Most trials that its kernel is fitted to."""
_FIT_ITERATIONS = 20
_NUM_DRAWN = 384
_NUM_NEAR = 128
_NUM_GENOMES = 96
_NUM_REFINED = 4
_NUM_AROUND = 32
_NUM_GENOMES_AROUND = 16
_STEPS = (0.1, 0.03)
"""Standard deviation of the moves from a good candidate in each round."""
_NUM_STARTS = 2
"""Candidates from which the gain is ascended, beside the one that the rounds found."""
_SAME = 0.8
"""Correlation above which two candidates lead to the same summit of the gain."""
_MAX_TURNS = 3
"""Most changes of a choice or a whole number, each followed by another ascent."""
_GENOME_STEPS = (0.1, 0.02, 0.004)
"""The same if genomes change as well, which cost more than all the rest of a candidate."""
_NEAR_STEPS = (0.2, 0.05, 0.01)
_BENDS = np.linspace(-0.95, 2.95, 20)
"""Candidate powers of the Yeo-Johnson transformation; 0 and 2, which need limits, are not among them."""
_NUM_LEADERS = 5
_SAMPLE_DRAW = 0x5A3
_WORTHWHILE = 1e-4
"""Expected improvement, in standard deviations of the scores, below which a summit is set aside."""
_NEAR = 0.4
"""Correlation with a summit above which a point belongs to it."""
_NUM_OF_SUMMITS = 6
"""Most trials near the summits that the model of the other regions knows."""
_MAX_SUMMITS = 16
_TURNS = 3
"""Period, in proposals, at which the model of all trials proposes although there are summits."""
_LIKELY = math.log(0.5)
"""Logarithm of the probability of keeping the bounds above which a running trial counts as feasible."""
_REFUSED = 1e6
"""Amount subtracted from the gain of points near a summit, so that others are preferred."""


@dataclass(frozen=True)
class Candidate:
    """A possible next point."""

    values: Mapping[str, Any]
    genome: Genome


@dataclass(frozen=True)
class Pool:
    """Encoded candidates with their genomes."""

    points: Encoded
    genomes: list[Genome]

    def __getitem__(self, rows: np.ndarray) -> Pool:
        return Pool(self.points[rows], [self.genomes[row] for row in rows])


@dataclass(frozen=True)
class View:
    """The trials that a model knows, with their scores and kernel."""

    rows: np.ndarray
    """Indices of the trials, rising."""
    scores: np.ndarray
    """Standardised scores of these trials."""
    kernel: Kernel
    num_at_fit: int
    """Number of trials that had ended when the kernel was fitted; 0: it was never fitted."""


class GaussianProcessModel:
    """Proposals by expected improvement, with a search for other summits; by several objectives, on their front.

    Once the model expects almost no improvement near the best trial, this region is set aside. Two of three proposals
    then come from a second model. It sees the summit cut off at the score of the best trial outside, so that any
    improvement lies elsewhere (a sequential niche technique: Beasley, Bull and Martin, 1993). It has its own kernel,
    since the many trials around a summit show how scores vary there, not how they vary elsewhere.
    """

    def __init__(self, encoder: Encoder, architecture: ArchitectureSpace | None, seed: int, *, is_liar: bool) -> None:
        self.encoder, self.architecture, self.seed, self.is_liar = encoder, architecture, seed, is_liar
        self.prior = Kernel.prior(encoder.typical_lengths())
        nothing = np.empty(0, dtype=np.int64)
        self._all: list[View] = []
        """A view of all trials for each objective."""
        self._elsewhere = self._unfitted = View(nothing, np.empty(0), self.prior, 0)
        self._summits: list[int] = []
        """Best trials of the regions that were set aside."""
        self._feasibility = Feasibility(encoder, self.prior)
        self._libraries = ThreadpoolController()

    def propose(self, number: int, history: History, pending: list[Encoded]) -> list[Candidate]:
        """Return points for the next trial, the best first.

        Args:
            number: number of the trial.
            history: ended trials.
            pending: points of running trials.
        """
        # On one thread: matrices are small, and sums depend on the number of threads.
        with self._libraries.limit(limits=1, user_api="blas"):
            pool, gains = self._most_promising(number, history, pending)
        return [self._candidate(pool, row) for row in np.argsort(-gains, kind="stable")[:_NUM_AROUND]]

    def _most_promising(self, number: int, history: History, pending: list[Encoded]) -> tuple[Pool, np.ndarray]:
        """Return candidates, and the logarithm of the expected improvement of each."""
        rng = rng_of(self.seed, number)
        scores, order = history.scores(), history.best_first()
        judged = history.judged() if len(history.judged()) else np.arange(len(scores))
        before = self._all if len(self._all) == history.num_objectives else [self._unfitted] * history.num_objectives
        columns = history.objectives()[judged].T
        order = np.searchsorted(judged, order[np.isin(order, judged)])
        self._all = [self._view(view, history, of, judged, order) for view, of in zip(before, columns, strict=True)]
        if history.has_bounds:
            self._feasibility.update(history)
        if history.has_bounds or len(self._all) > 1:
            return self._search(self._all, history, pending, rng)
        summit = int(np.argmax(scores))
        found = None
        # Otherwise only the other model proposes: a search here would cost as much, unused.
        if number % _TURNS == 0 or not self._summits:
            found = pool, gains = self._search(self._all, history, pending, rng)
            near = self._are_near(pool.points, history.points()[[summit]])
            if gains[near].max(initial=-np.inf) < math.log(_WORTHWHILE) and summit not in self._summits:
                self._summits = [*self._summits, summit][-_MAX_SUMMITS:]
            if not self._summits or number % _TURNS == 0:
                return found
        aside = history.points()[self._summits]
        inside = self._are_near(history.points(), aside)
        if inside.all():
            return found or self._search(self._all, history, pending, rng)
        members = np.flatnonzero(inside)
        members = members[np.argsort(-scores[members], kind="stable")[:_NUM_OF_SUMMITS]]
        rows = np.sort(np.append(np.flatnonzero(~inside), members))
        cut = np.minimum(scores, scores[~inside].max())[rows]
        order = np.argsort(-cut, kind="stable")
        self._elsewhere = self._view(self._elsewhere, history, cut, rows, order)
        pool, gains = self._search([self._elsewhere], history, pending, rng)
        return pool, np.where(self._are_near(pool.points, aside), gains - _REFUSED, gains)

    def _are_near(self, points: Encoded, summits: Encoded) -> np.ndarray:
        """Return True for each point near any of the summits: [len(points)]."""
        kernel = self._all[0].kernel
        covariance = kernel.covariance(self.encoder.distances(points, summits))
        near: np.ndarray = np.any(covariance > _NEAR * math.exp(kernel.log_signal), axis=1)
        return near

    def _search(
        self, views: Sequence[View], history: History, pending: list[Encoded], rng: np.random.Generator
    ) -> tuple[Pool, np.ndarray]:
        """Return candidates, and the logarithm of the expected improvement of each.

        With bounds it is that on the feasible trials, times the probability of being feasible; the latter alone as long
        as no trial is feasible.

        Candidates are drawn everywhere and near the best trials, then around the most promising ones with ever smaller
        moves. From the best that are not near each other the gain is ascended.

        Args:
            views: a view of the same trials for each objective.
            history: ended trials.
            pending: points of running trials.
            rng: random numbers of this proposal.
        """
        rows = views[0].rows
        known, scores = history.points()[rows], np.array([view.scores for view in views])
        is_feasible = history.total_violations()[rows] == 0
        bounds = self._feasibility if history.has_bounds else None
        if pending:
            running = stack(pending[-_MAX_PENDING:])
            known, scores = self._with_pending(views, known, scores, running)
            likely = np.ones(len(running), bool) if bounds is None else bounds.log_probability(running) > _LIKELY
            is_feasible = np.append(is_feasible, likely & is_feasible.any())
        distances = self.encoder.distances(known, known)
        posteriors = [Posterior(view.kernel, distances, of) for view, of in zip(views, scores, strict=True)]
        aim = self._aim(scores[:, is_feasible], rng) if is_feasible.any() else None
        gain = Acquisition(self.encoder, known, posteriors, aim, bounds)
        if bounds is None and len(views) == 1:
            leaders = rows[np.argsort(-views[0].scores, kind="stable")[:_NUM_LEADERS]]
        else:
            leaders = history.best_first()[:_NUM_LEADERS]
        pool = self._pool(history, leaders, rng)
        gains = gain.at(pool.points)
        starts = self._starts(views[0].kernel, pool, gains)
        has_genomes = self.architecture is not None
        for step in _GENOME_STEPS if has_genomes else _STEPS:
            top = pool[np.argsort(-gains, kind="stable")[:_NUM_REFINED]]
            moved = self._around(top, _NUM_GENOMES_AROUND if has_genomes else _NUM_AROUND, step, rng)
            pool = Pool(stack([pool.points, moved.points]), [*pool.genomes, *moved.genomes])
            gains = np.append(gains, gain.at(moved.points))
        risen = self._ascended(gain, pool[np.unique([*starts, int(np.argmax(gains))])])
        pool = Pool(stack([pool.points, risen.points]), [*pool.genomes, *risen.genomes])
        return pool, np.append(gains, gain.at(risen.points))

    def _aim(self, scores: np.ndarray, rng: np.random.Generator) -> Best | Front:
        """Return what is to be improved on, of scores [num_objectives, n].

        Of more than two objectives one counts beside a random mixture of the others (as in ParEGO: Knowles, 2006).
        """
        if len(scores) == 1:
            return Best(float(scores.max()))
        mix = np.eye(2)
        if len(scores) > 2:
            mix = np.array([np.zeros(len(scores)), rng.dirichlet(np.ones(len(scores)))])
            mix[:, int(rng.integers(len(scores)))] = 1.0, 0.0
        return Front(scores.T, mix)

    def _starts(self, kernel: Kernel, pool: Pool, gains: np.ndarray) -> list[int]:
        """Return the rows of the best candidates that are not near each other."""
        rows: list[int] = []
        left = gains.copy()
        while len(rows) < _NUM_STARTS and np.isfinite(left).any():
            rows.append(int(np.argmax(left)))
            covariance = kernel.covariance(self.encoder.distances(pool.points, pool.points[rows[-1:]]))[:, 0]
            left[covariance > _SAME * math.exp(kernel.log_signal)] = -np.inf
        return rows

    def _ascended(self, gain: Acquisition, pool: Pool) -> Pool:
        """Return the summits over candidates; the best also by neighbours, in turns (Optuna's `GPSampler` does so)."""
        summits = stack([self._ascend(gain, pool.points[[row]]) for row in range(len(pool.genomes))])
        row = int(np.argmax(gain.at(summits)))
        best = summits[[row]]
        for _ in range(_MAX_TURNS):
            near = stack([best, self.encoder.imputed(self.encoder.neighbours(best))])
            chosen = int(np.argmax(gain.at(near)))
            if chosen == 0:
                break
            best = self._ascend(gain, near[[chosen]])
        return Pool(stack([summits, best]), [*pool.genomes, pool.genomes[row]])

    def _ascend(self, gain: Acquisition, point: Encoded) -> Encoded:
        is_free = self.encoder.is_real & self.encoder.active(point)[0][0]
        return gain.ascend(point, is_free) if is_free.any() else point

    # -- the model -----------------------------------------------------------------------------------------------------

    def _view(self, before: View, history: History, scores: np.ndarray, rows: np.ndarray, order: np.ndarray) -> View:
        """Return the view of the trials `rows`; the kernel is kept while few trials have ended since its fit.

        Args:
            before: the view at the previous proposal.
            history: ended trials.
            scores: score of each of these trials.
            rows: indices of the trials.
            order: indices into `rows`, the best trial first.
        """
        standardised = _standardised(scores)
        kernel, num_at_fit = before.kernel, before.num_at_fit
        if num_at_fit == 0 or len(history) - num_at_fit >= max(1, num_at_fit // 16):
            some = self._kept(order, _MAX_FITTED)
            points = history.points()[rows[some]]
            distances = self.encoder.distances(points, points)
            kernel = fit(distances, standardised[some], self.prior, kernel, _FIT_ITERATIONS)
            num_at_fit = len(history)
        kept = self._kept(order, _MAX_MODELLED)
        return View(rows[kept], standardised[kept], kernel, num_at_fit)

    def _kept(self, order: np.ndarray, limit: int) -> np.ndarray:
        """Return at most `limit` of the trials, given the best first: half of them, and a fixed sample of the rest."""
        if len(order) <= limit:
            return np.arange(len(order))
        best, others = order[: limit // 2], order[limit // 2 :]
        lots = rng_of(self.seed, _SAMPLE_DRAW).random(len(order))  # the n-th trial's number never changes
        drawn = others[np.argsort(lots[others], kind="stable")[: limit - limit // 2]]
        return np.sort(np.concatenate([best, drawn]))

    def _with_pending(
        self, views: Sequence[View], known: Encoded, scores: np.ndarray, pending: Encoded
    ) -> tuple[Encoded, np.ndarray]:
        """Return all trials with their scores: running ones have the predicted scores, or the worst."""
        if self.is_liar:
            believed = np.repeat(scores.min(1, keepdims=True), len(pending), axis=1)
        else:
            distances, to_pending = (self.encoder.distances(known, others) for others in (known, pending))
            posteriors = [Posterior(view.kernel, distances, of) for view, of in zip(views, scores, strict=True)]
            believed = np.array([posterior.at(to_pending)[0] for posterior in posteriors])
        return stack([known, pending]), np.concatenate([scores, believed], axis=1)

    # -- where it looks ------------------------------------------------------------------------------------------------

    def _pool(self, history: History, leaders: np.ndarray, rng: np.random.Generator) -> Pool:
        """Return random points, and points near the best trials."""
        num_drawn, num_near = (_NUM_DRAWN, _NUM_NEAR) if self.architecture is None else (_NUM_GENOMES, _NUM_GENOMES)
        genomes: list[Genome] = [None] * num_drawn
        if self.architecture is not None:
            genomes = [self.architecture.sample(rng) for _ in range(num_drawn)]
        drawn = Encoded(
            self.encoder.snap(rng.random((num_drawn, len(self.encoder.numeric)))),
            np.column_stack([np.empty((num_drawn, 0), int), *(rng.integers(n, size=num_drawn) for n in self._options)]),
            self.encoder.encode_genomes(genomes),
        )
        drawn = self.encoder.imputed(drawn)
        best = Pool(history.points()[leaders], [history.genomes[row] for row in leaders])
        parts = [
            self._around(best, num_near // len(leaders) // len(_NEAR_STEPS) + 1, step, rng) for step in _NEAR_STEPS
        ]
        return Pool(
            stack([drawn, *(part.points for part in parts)]), [*genomes, *(g for part in parts for g in part.genomes)]
        )

    @property
    def _options(self) -> list[int]:
        return self.encoder.num_options

    def _around(self, pool: Pool, count: int, step: float, rng: np.random.Generator) -> Pool:
        """Return `count` points near each: some numbers are moved, sometimes a choice or the genome is changed."""
        points = pool.points[np.repeat(np.arange(len(pool.points)), count)]
        genomes = [genome for genome in pool.genomes for _ in range(count)]
        num_units = points.units.shape[1]
        # Half of the points move in all numbers, the others in each with probability 1/2.
        moves = rng.normal(0, step, points.units.shape) * (
            rng.random(points.units.shape) < rng.choice([0.5, 1], (len(points), 1))
        )
        units = self.encoder.snap(points.units + moves) if num_units else points.units
        choices = points.choices.copy()
        for axis, options in enumerate(self._options):
            changed = rng.random(len(points)) < 0.2
            choices[changed, axis] = rng.integers(options, size=int(changed.sum()))
        if self.architecture is not None:
            chance = 0.5 if self.encoder.space else 1.0
            architecture = self.architecture
            genomes = [architecture.mutate(g, rng) if rng.random() < chance else g for g in genomes]
        return Pool(self.encoder.imputed(Encoded(units, choices, self.encoder.encode_genomes(genomes))), genomes)

    def _candidate(self, pool: Pool, row: int) -> Candidate:
        points = pool.points
        return Candidate(self.encoder.decode(points.units[row], points.choices[row]), pool.genomes[row])


def _standardised(scores: np.ndarray) -> np.ndarray:
    """Return scores with mean 0 and variance 1, transformed towards a normal distribution (Yeo and Johnson, 2000).

    Otherwise a few terrible scores would hide the differences between the good ones.
    """
    poor, best = float(np.quantile(scores, 0.25)), float(scores.max())
    scores = np.maximum(scores, poor - 3 * (best - poor))  # a diverged trial is bad, whatever its score
    spread = float(scores.std())
    if not spread > 1e-12 * max(abs(float(scores.mean())), 1e-300):
        return np.zeros(len(scores))
    plain = (scores - scores.mean()) / spread
    logs = np.sign(plain) * np.log1p(np.abs(plain))
    bends = _BENDS[:, None]  # the power of scores above the mean; below it is 2 minus that
    above = np.expm1(bends * np.log1p(np.maximum(plain, 0))) / bends
    below = np.expm1((2 - bends) * np.log1p(np.maximum(-plain, 0))) / (2 - bends)
    warped = above - below
    spreads = warped.std(1)
    likelihood = -len(scores) * np.log(np.maximum(spreads, 1e-300)) + (_BENDS - 1) * logs.sum()
    chosen = int(np.argmax(likelihood))
    standardised: np.ndarray = (warped[chosen] - warped[chosen].mean()) / spreads[chosen]
    return standardised

"""Expected improvement under a Gaussian process, maximised over numbers, choices and genomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.search.methods.base import rng_of
from orchestray.search.methods.hyper.encoding import Encoded, Encoder, stack
from orchestray.search.methods.hyper.gaussian_process import Kernel, Posterior, fit, log_expected_improvement
from orchestray.search.spaces.base import Genome

if TYPE_CHECKING:
    from orchestray.search.methods.hyper.history import History
    from orchestray.search.spaces.base import ArchitectureSpace

_MAX_MODELLED = 160
"""Trials the model knows at most, so that a proposal costs the same however many there were: the best, and a sample."""
_MAX_FITTED = 128
"""Trials its kernel is fitted to at most."""
_FIT_ITERATIONS = 20
_NUM_DRAWN = 384
_NUM_NEAR = 128
_NUM_GENOMES = 96
_NUM_REFINED = 4
_NUM_AROUND = 32
_NUM_GENOMES_AROUND = 16
_STEPS = (0.1, 0.05, 0.02, 0.01, 0.004, 0.0015)
"""Standard deviations of the moves from a good candidate, round by round."""
_GENOME_STEPS = (0.1, 0.02, 0.004)
"""The same where genomes are changed as well, each of which costs more than all the rest of a candidate."""
_NEAR_STEPS = (0.2, 0.05, 0.01)
_BENDS = np.linspace(-0.95, 2.95, 20)
"""Powers of Yeo and Johnson that are tried; 0 and 2, which are limits, not among them."""
_SAMPLE_DRAW = 0x5A3


@dataclass(frozen=True)
class Candidate:
    """A point that might be tried."""

    values: Mapping[str, Any]
    genome: Genome


@dataclass(frozen=True)
class Pool:
    """Candidates, encoded, with their genomes."""

    points: Encoded
    genomes: list[Genome]

    def __getitem__(self, rows: np.ndarray) -> Pool:
        return Pool(self.points[rows], [self.genomes[row] for row in rows])


class GaussianProcessModel:
    """Proposes by expected improvement."""

    def __init__(self, encoder: Encoder, architecture: ArchitectureSpace | None, seed: int, *, is_liar: bool) -> None:
        self.encoder, self.architecture, self.seed, self.is_liar = encoder, architecture, seed, is_liar
        self.prior = Kernel.prior(encoder.typical_lengths())
        self.kernel = self.prior
        self._fitted_at = 0

    def propose(self, number: int, history: History, pending: list[Encoded]) -> list[Candidate]:
        """Points for the trial of this number, the best first."""
        scores = _standardised(history.scores())
        kept = self._kept(scores, _MAX_MODELLED)
        if self._fitted_at == 0 or len(history) - self._fitted_at >= max(1, self._fitted_at // 16):
            self._fit(history, scores)
        known, scores = history.points()[kept], scores[kept]
        if pending:
            known, scores = self._with_pending(known, scores, stack(pending))
        posterior = Posterior(self.kernel, self.encoder.distances(known, known), scores)
        best = float(scores.max())

        def gain(points: Encoded) -> np.ndarray:
            means, deviations = posterior.at(self.encoder.distances(known, points))
            return log_expected_improvement(means, deviations, best)

        leaders = kept[np.argsort(-scores[: len(kept)], kind="stable")[:5]]
        rng = rng_of(self.seed, number)
        pool = self._pool(history, leaders, rng)
        gains = gain(pool.points)
        has_genomes = self.architecture is not None
        for step in _GENOME_STEPS if has_genomes else _STEPS:
            top = pool[np.argsort(-gains, kind="stable")[:_NUM_REFINED]]
            moved = self._around(top, _NUM_GENOMES_AROUND if has_genomes else _NUM_AROUND, step, rng)
            pool = Pool(stack([pool.points, moved.points]), [*pool.genomes, *moved.genomes])
            gains = np.append(gains, gain(moved.points))
        order = np.argsort(-gains, kind="stable")[:_NUM_AROUND]
        return [self._candidate(pool, row) for row in order]

    # -- the model -----------------------------------------------------------------------------------------------------

    def _kept(self, scores: np.ndarray, limit: int) -> np.ndarray:
        """Indices of the trials the model knows: half of them the best, the others drawn once and for all."""
        if len(scores) <= limit:
            return np.arange(len(scores))
        order = np.argsort(-scores, kind="stable")
        best, others = order[: limit // 2], order[limit // 2 :]
        lots = rng_of(self.seed, _SAMPLE_DRAW).random(len(scores))  # the n-th trial's lot is the same ever after
        drawn = others[np.argsort(lots[others], kind="stable")[: limit - limit // 2]]
        return np.sort(np.concatenate([best, drawn]))

    def _fit(self, history: History, scores: np.ndarray) -> None:
        rows = self._kept(scores, _MAX_FITTED)
        points = history.points()[rows]
        self.kernel = fit(
            self.encoder.distances(points, points), scores[rows], self.prior, self.kernel, _FIT_ITERATIONS
        )
        self._fitted_at = len(history)

    def _with_pending(self, known: Encoded, scores: np.ndarray, pending: Encoded) -> tuple[Encoded, np.ndarray]:
        """The trials with those that still run, at the score the model believes of them, or at the worst."""
        if self.is_liar:
            believed = np.full(len(pending), scores.min())
        else:
            posterior = Posterior(self.kernel, self.encoder.distances(known, known), scores)
            believed = posterior.at(self.encoder.distances(known, pending))[0]
        return stack([known, pending]), np.concatenate([scores, believed])

    # -- where it looks ------------------------------------------------------------------------------------------------

    def _pool(self, history: History, leaders: np.ndarray, rng: np.random.Generator) -> Pool:
        """Points drawn evenly, and points near the best trials."""
        num_drawn, num_near = (_NUM_DRAWN, _NUM_NEAR) if self.architecture is None else (_NUM_GENOMES, _NUM_GENOMES)
        genomes: list[Genome] = [None] * num_drawn
        if self.architecture is not None:
            genomes = [self.architecture.sample(rng) for _ in range(num_drawn)]
        drawn = Encoded(
            self.encoder.snap(rng.random((num_drawn, len(self.encoder.numeric)))),
            np.column_stack([np.empty((num_drawn, 0), int), *(rng.integers(n, size=num_drawn) for n in self._options)]),
            self.encoder.encode_genomes(genomes),
        )
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
        """`count` points near each: some of its numbers moved, now and then a choice or the genome changed."""
        points = pool.points[np.repeat(np.arange(len(pool.points)), count)]
        genomes = [genome for genome in pool.genomes for _ in range(count)]
        num_units = points.units.shape[1]
        # all numbers of half of the points are moved, and of the others each with an even chance
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
        return Pool(Encoded(units, choices, self.encoder.encode_genomes(genomes)), genomes)

    def _candidate(self, pool: Pool, row: int) -> Candidate:
        points = pool.points
        return Candidate(self.encoder.decode(points.units[row], points.choices[row]), pool.genomes[row])


def _standardised(scores: np.ndarray) -> np.ndarray:
    """Mean 0, variance 1, and drawn towards a normal distribution (Yeo and Johnson, 2000): a few terrible scores else
    hide the differences between the good.
    """
    poor, best = float(np.quantile(scores, 0.25)), float(scores.max())
    scores = np.maximum(scores, poor - 3 * (best - poor))  # a trial that diverged is bad, however far it got
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

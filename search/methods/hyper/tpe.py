"""The tree-structured Parzen estimator: Bergstra et al., Algorithms for hyper-parameter optimization, 2011, section 4.

Good trials weigh by how much they improve on the others (Watanabe, "Tree-Structured Parzen Estimator: Understanding Its
Algorithm Components", 2023, section 3.3.2), here by its square, which finds better points in the same trials.

Vectorised over trials and candidates, because optuna's gets slower with every trial.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from orchestray.search.methods.base import rng_of
from orchestray.search.methods.hyper.encoding import Encoded, Encoder, stack, widened
from orchestray.search.methods.hyper.surrogates import Candidate
from orchestray.search.spaces.architectures.choices import ChoiceSpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestray.search.methods.hyper.history import History
    from orchestray.search.spaces.architectures.base import ArchitectureSpace, Genome

_NUM_CANDIDATES = 24
_MAX_GOOD = 25
_GOOD_PART = 0.15
_UNIFORM = 0.1
"""Part of the candidates that is drawn evenly, so that every value of a space stays possible."""
_MOST_TOGETHER = 8
"""Most keys that are drawn together: of more, few good trials show hardly more than the trials themselves."""
_EVEN = 10.0
"""Width of a normal density that is as good as even on [0, 1]."""
_LEAST = -700.0
"""Logarithm of the least density: below that, exponentials underflow, and take several times as long."""
_ROOT = math.sqrt(2 * math.pi)


class ParzenModel:
    """A model that proposes points that are likely among the good trials and unlikely among the others."""

    def __init__(self, encoder: Encoder, architecture: ArchitectureSpace | None, seed: int) -> None:
        self.encoder, self.architecture, self.seed = encoder, architecture, seed

    def propose(self, number: int, history: History, pending: list[Encoded]) -> list[Candidate]:
        """Return points for the next trial, the best first.

        Args:
            number: number of the trial.
            history: ended trials.
            pending: points of running trials, which count as bad.
        """
        rng = rng_of(self.seed, number)
        order = history.best_first()
        num_good = min(max(2, math.ceil(_GOOD_PART * len(order))), _MAX_GOOD)
        points = history.points()
        good, bad = points[order[:num_good]], stack([points[order[num_good:]], *pending])
        options = self.encoder.num_options
        together = history.num_objectives == 1 and points.units.shape[1] + len(options) <= _MOST_TOGETHER
        weights = _improvements(history, order, num_good)
        of_good = Parzen(good, options, *self.encoder.active(good), weights, together=together)
        of_bad = Parzen(bad, options, *self.encoder.active(bad), np.ones(len(bad)), together=together)
        units, choices = of_good.sample(_NUM_CANDIDATES, rng)
        units = self.encoder.snap(units)
        drawn = Encoded(units, choices, np.empty((_NUM_CANDIDATES, 0), dtype=np.int64))
        has = self.encoder.active(drawn)
        gains = of_good.log_density(drawn, *has) - of_bad.log_density(drawn, *has)
        genomes: list[Genome] = [None] * _NUM_CANDIDATES
        if self.architecture is not None:
            parents = [history.genomes[row] for row in order[:num_good]]
            shares = weights / weights.sum()
            genomes = [self._genome(self.architecture, parents, shares, rng) for _ in range(_NUM_CANDIDATES)]
            gains += _log_ratio(self.encoder.encode_genomes(genomes), good.genes, bad.genes)
        best_first = np.argsort(-gains, kind="stable")
        return [Candidate(self.encoder.decode(units[row], choices[row]), genomes[row]) for row in best_first]

    def _genome(
        self, architecture: ArchitectureSpace, parents: Sequence[Genome], shares: np.ndarray, rng: np.random.Generator
    ) -> Genome:
        """Return a genome similar to the good ones.

        In a space of choices each choice is drawn by its frequency among the good ones; in another space a good one is
        mutated.

        Args:
            architecture: the space.
            parents: the good ones.
            shares: probability that each is mutated, [len(parents)].
            rng: source of the draws.
        """
        if rng.random() < _UNIFORM:
            return architecture.sample(rng)
        if not isinstance(architecture, ChoiceSpace):
            return architecture.mutate(parents[int(rng.choice(len(parents), p=shares))], rng)

        chosen = [architecture.chosen_in(parent) for parent in parents]  # a genome may be of another format

        def pick(name: str, options: Any) -> int:
            listed = list(options)
            made = [listed.index(one[name]) for one in chosen if name in one and one[name] in listed]
            return int(rng.choice(len(listed), p=_shares(np.array(made, dtype=np.int64), len(listed))))

        return architecture.genome_of(architecture.decide(pick))


class Parzen:
    """A density of points: the weighted mean of one around each trial and of an even one, which weighs as a trial does.

    Around a trial each number is normal, truncated to [0, 1]. Its width is the distance to the farther neighbour. Each
    choice is mostly the trial's own. All keys are drawn of one trial, which proposes values that are good together, or
    each by itself (section 4 of the paper).
    """

    def __init__(
        self,
        points: Encoded,
        options: Sequence[int],
        has_units: np.ndarray,
        chose: np.ndarray,
        weights: np.ndarray,
        *,
        together: bool,
    ) -> None:
        """Place a density around each of n trials.

        Args:
            points: the trials.
            options: number of options of each choice.
            has_units: True where a trial has the number, [n, num_units]; elsewhere it says nothing about it.
            chose: the same for choices, [n, num_choices].
            weights: weight of each trial, [n], 1 in the mean.
            together: True to draw all keys of a point of one trial.
        """
        units, choices = points.units, points.choices
        count, num_units = units.shape
        self._together = together
        self._weights = np.append(weights, 1.0) / (count + 1)
        self.centres, self.widths = np.full((count + 1, num_units), 0.5), np.ones((count + 1, num_units))
        for axis in range(num_units):
            rows = np.flatnonzero(has_units[:, axis])
            self.centres[rows, axis], self.widths[:-1, axis] = units[rows, axis], _EVEN
            self.widths[rows, axis] = _widths(units[rows, axis])
        self._low, self._high = ndtr(-self.centres / self.widths), ndtr((1 - self.centres) / self.widths)
        self._log_areas = np.log(self.widths * (self._high - self._low) * _ROOT)
        self._shares = []
        for axis, number in enumerate(options):
            shares = np.full((count + 1, number), 1 / (count + 1))
            chosen = np.flatnonzero(chose[:, axis])
            shares[chosen, choices[chosen, axis]] += 1.0
            self._shares.append(shares / shares.sum(1, keepdims=True))

    def sample(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` draws: numbers [count, num_units] and codes [count, num_choices]."""
        num_units = self.centres.shape[1]
        draws = rng.random((count, 1 if self._together else num_units + len(self._shares)))
        of = np.searchsorted(np.cumsum(self._weights[:-1]), draws, side="right")
        of = np.broadcast_to(of, (count, num_units + len(self._shares)))
        of_units, axes = of[:, :num_units], np.arange(num_units)
        low, high = self._low[of_units, axes], self._high[of_units, axes]
        levels = low + rng.random(low.shape) * (high - low)
        drawn = self.centres[of_units, axes] + self.widths[of_units, axes] * ndtri(levels)
        choices = np.empty((count, len(self._shares)), dtype=np.int64)
        for axis, shares in enumerate(self._shares):
            bounds = np.cumsum(shares[of[:, num_units + axis]], 1)[:, :-1]
            choices[:, axis] = (rng.random((count, 1)) > bounds).sum(1)
        return np.clip(drawn, 0.0, 1.0), choices

    def log_density(self, points: Encoded, has_units: np.ndarray, chose: np.ndarray) -> np.ndarray:
        """Return the logarithm of the density of points over the keys that they have, [m]; as in `__init__`."""
        joint, apart = np.zeros((len(points), len(self.centres))), np.zeros(len(points))
        for column, has in self._columns(points, has_units, chose):
            column *= has[:, None]
            if self._together:
                joint += column
            else:
                apart += _log_mean(column, self._weights)
        return _log_mean(joint, self._weights) if self._together else apart

    def _columns(
        self, points: Encoded, has_units: np.ndarray, chose: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the logarithms of the densities of m points around n trials by each key, and which points have it."""
        for axis in range(points.units.shape[1]):
            z = (points.units[:, axis, None] - self.centres[:, axis]) / self.widths[:, axis]
            z *= z
            z *= -0.5
            z -= self._log_areas[:, axis]
            yield z, has_units[:, axis]
        for axis, shares in enumerate(self._shares):
            yield np.log(shares).T[points.choices[:, axis]], chose[:, axis]


def _log_mean(logs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the logarithms of the weighted means of each row; the even density keeps them far from zero."""
    log_means: np.ndarray = np.log(np.exp(np.maximum(logs, _LEAST)) @ weights)
    return log_means


def _improvements(history: History, order: np.ndarray, num_good: int) -> np.ndarray:
    """Return the weights of the good trials: squares of what they are better by than the next one, 1 in the mean.

    All weigh the same where that says nothing: with several objectives, and where one of them breaks a bound.
    """
    compared, even = order[: num_good + 1], np.ones(num_good)
    if history.num_objectives > 1 or len(compared) == num_good or history.total_violations()[compared].any():
        return even
    scores = history.scores()[compared]
    squares: np.ndarray = (scores[:-1] - scores[-1]) ** 2
    return squares / squares.mean() if 0 < squares.mean() < math.inf else even


def _widths(numbers: np.ndarray) -> np.ndarray:
    """Return the distance of each number to the farther of its neighbours, within bounds: [n]."""
    order = np.argsort(numbers, kind="stable")
    ends = ([0.0], [1.0]) if len(numbers) == 1 else ([np.nan], [np.nan])
    gaps = np.diff(np.concatenate([ends[0], numbers[order], ends[1]]))
    widths = np.empty(len(numbers))
    widths[order] = np.clip(np.fmax(gaps[:-1], gaps[1:]), 1 / min(100, len(numbers) + 2), 1.0)
    return widths


def _shares(codes: np.ndarray, options: int) -> np.ndarray:
    """Return the frequency of each option, with one additional count each: [options], sum 1."""
    counts = np.bincount(codes, minlength=options) + 1.0
    shares: np.ndarray = counts / counts.sum()
    return shares


def _log_ratio(genes: np.ndarray, good: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """Return the log-ratio of each row's likelihood among the good and the bad, over all columns: [len(genes)]."""
    total = np.zeros(len(genes))
    good, bad = widened(good, genes.shape[1]), widened(bad, genes.shape[1])
    for column in range(genes.shape[1]):
        codes = genes[:, column] + 1
        options = 1 + int(max(codes.max(), good[:, column].max() + 1, bad[:, column].max(initial=-1) + 1))
        likely, unlikely = _shares(good[:, column] + 1, options), _shares(bad[:, column] + 1, options)
        total += np.log(likely / unlikely)[codes]
    return total

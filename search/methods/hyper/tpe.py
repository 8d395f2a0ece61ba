"""The tree-structured Parzen estimator: Bergstra et al., Algorithms for hyper-parameter optimization, 2011, section 4.

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
    from orchestray.search.methods.hyper.history import History
    from orchestray.search.spaces.architectures.base import ArchitectureSpace, Genome

_NUM_CANDIDATES = 24
_MAX_GOOD = 25
_GOOD_PART = 0.15
_UNIFORM = 0.1
"""Part of the candidates that is drawn evenly, so that every value of a space stays possible."""


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
        (has_good, chose_good), (has_bad, chose_bad) = self.encoder.active(good), self.encoder.active(bad)
        of_units = np.empty((_NUM_CANDIDATES, points.units.shape[1]))
        units = np.empty_like(of_units)
        for axis in range(units.shape[1]):  # only the trials that have a key say which of its values are good
            among_good = Parzen(good.units[has_good[:, axis], axis])
            among_bad = Parzen(bad.units[has_bad[:, axis], axis])
            units[:, axis] = among_good.sample(_NUM_CANDIDATES, rng)
            of_units[:, axis] = among_good.log_density(units[:, axis]) - among_bad.log_density(units[:, axis])
        choices = np.empty((_NUM_CANDIDATES, points.choices.shape[1]), dtype=np.int64)
        of_choices = np.empty(choices.shape)
        for axis, options in enumerate(self.encoder.num_options):
            likely = _shares(good.choices[chose_good[:, axis], axis], options)
            unlikely = _shares(bad.choices[chose_bad[:, axis], axis], options)
            choices[:, axis] = rng.choice(options, size=_NUM_CANDIDATES, p=likely)
            of_choices[:, axis] = np.log(likely / unlikely)[choices[:, axis]]
        units = self.encoder.snap(units)
        none = np.empty((_NUM_CANDIDATES, 0), dtype=np.int64)
        has_units, has_choices = self.encoder.active(Encoded(units, choices, none))
        gains = np.where(has_units, of_units, 0.0).sum(1) + np.where(has_choices, of_choices, 0.0).sum(1)
        genomes: list[Genome] = [None] * _NUM_CANDIDATES
        if self.architecture is not None:
            genomes = [self._genome(self.architecture, history, order[:num_good], rng) for _ in range(_NUM_CANDIDATES)]
            gains += _log_ratio(self.encoder.encode_genomes(genomes), good.genes, bad.genes)
        best_first = np.argsort(-gains, kind="stable")
        return [Candidate(self.encoder.decode(units[row], choices[row]), genomes[row]) for row in best_first]

    def _genome(
        self, architecture: ArchitectureSpace, history: History, good: np.ndarray, rng: np.random.Generator
    ) -> Genome:
        """Return a genome similar to the good ones.

        In a space of choices each choice is drawn by its frequency among the good ones; in another space a good one is
        mutated.
        """
        if rng.random() < _UNIFORM:
            return architecture.sample(rng)
        parents = [history.genomes[row] for row in good]
        if not isinstance(architecture, ChoiceSpace):
            return architecture.mutate(parents[int(rng.integers(len(parents)))], rng)

        def pick(name: str, options: Any) -> int:
            listed = list(options)
            made = [listed.index(g[name]) for g in parents if name in g and g[name] in listed]
            return int(rng.choice(len(listed), p=_shares(np.array(made, dtype=np.int64), len(listed))))

        return architecture.genome_of(architecture.decide(pick))


class Parzen:
    """A mixture of normal distributions around numbers in [0, 1] and a wide one in the middle, truncated to [0, 1].

    The width of each is the distance to the farther neighbour (section 4.2 of the paper), within bounds.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        """Place a distribution around each of `numbers`, [n] in [0, 1]."""
        centres = np.sort(np.append(numbers, 0.5))
        gaps = np.diff(np.concatenate([[0.0], centres, [1.0]]))
        narrowest = 1 / min(100, len(centres) + 1)
        self.centres = np.append(numbers, 0.5)
        widths = np.clip(np.maximum(gaps[:-1], gaps[1:]), narrowest, 1.0)
        self.widths = widths[np.searchsorted(centres, self.centres)]
        self.widths[-1] = 1.0
        self._low, self._high = ndtr(-self.centres / self.widths), ndtr((1 - self.centres) / self.widths)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` draws, [count]."""
        of = rng.integers(len(self.centres), size=count)
        levels = self._low[of] + rng.random(count) * (self._high[of] - self._low[of])
        drawn: np.ndarray = np.clip(self.centres[of] + self.widths[of] * ndtri(levels), 0.0, 1.0)
        return drawn

    def log_density(self, numbers: np.ndarray) -> np.ndarray:
        """Return the logarithm of the density at `numbers`, [m]."""
        z = (numbers[:, None] - self.centres) / self.widths
        densities = np.exp(-(z**2) / 2) / (self.widths * (self._high - self._low))
        log_density: np.ndarray = np.log(densities.mean(1) / math.sqrt(2 * math.pi) + 1e-300)
        return log_density


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

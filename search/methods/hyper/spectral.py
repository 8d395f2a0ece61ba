"""Harmonica: Hazan et al., Hyperparameter optimization: a spectral approach, 2018."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Observation, Proposal, rng_of
from orchestray.search.methods.conditions import is_among
from orchestray.search.methods.hyper.boolean_polynomials import Term, best_assignments, num_parities, sparse_terms
from orchestray.search.methods.hyper.proposer import MAX_DRAWS, Proposer
from orchestray.search.spaces.dimensions import Binary, Choice

_MAX_PRODUCTS = 100_000
_LEARNT_DRAW = 0x1EA


class Spectral(Proposer):
    """A search over many on/off choices of which few matter (Algorithm 2 of the paper).

    In each stage `samples` points are drawn. A sparse polynomial of low degree over their bits is fitted to the scores
    by Lasso. Its bits are then fixed to one of its `keep` best assignments, drawn for each point; the next stage
    continues with the others. After the last stage the remaining trials are drawn with all found bits fixed.

    Order-free: a stage begins when all trials of the previous one have ended, and sorts their scores by number.
    """

    is_order_free = True

    def __init__(
        self,
        *,
        stages: int = 3,
        samples: int = 100,
        degree: int = 3,
        terms: int = 5,
        keep: int = 4,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.Spectral` and the arguments of `Method`.

        Raises:
            ConfigError: a dimension does not have two values, the polynomial has too many products, or a parameter is
                below 1.
        """
        super().__init__(**arguments)
        for name, value in {"stages": stages, "degree": degree, "terms": terms, "keep": keep}.items():
            if value < 1:
                raise ConfigError(f"search.method.{name}: must be >= 1, got {value}")
        if samples < 4:
            raise ConfigError(f"search.method.samples: must be >= 4, got {samples}")
        for key, dimension in self.space.items():
            if not isinstance(dimension, Binary | Choice) or dimension.num_values != 2:
                raise ConfigError(
                    f"search.space.{key}: spectral needs choices between two values (binary, or choice of two); "
                    f"use bayesian or random for others"
                )
        if self.architecture is not None:
            raise ConfigError("spectral needs bits and has none of an architecture; use genetic_cnn or bayesian")
        if (products := num_parities(len(self.space), degree)) > _MAX_PRODUCTS:
            raise ConfigError(
                f"search.method.degree: {len(self.space)} bits have {products} products of up to {degree}, more than "
                f"{_MAX_PRODUCTS}; choose a lower degree"
            )
        self.stages, self.samples, self.degree, self.num_terms, self.keep = stages, samples, degree, terms, keep
        self.terms: list[list[Term]] = []
        """Terms found in each stage; bits are numbered like the keys of the space."""
        self._fixed: list[list[dict[int, int]]] = []
        """Best assignments of each stage."""
        self._two = {key: (dimension.all_values() or [])[:2] for key, dimension in self.space.items()}
        self._signs: dict[int, np.ndarray] = {}
        """Signs of each trial of this stage."""
        self._scores: dict[int, float | None] = {}

    def ask(self) -> Proposal | None:
        if self.is_done or (len(self.terms) < self.stages and len(self._signs) >= self.samples):
            return None
        rng = rng_of(self.seed, self.num_asked)
        known: tuple[np.ndarray, dict[str, Any]] | None = None
        for draw in range(MAX_DRAWS):
            signs = self._draw(rng)
            drawn = {key: two[int(sign < 0)] for (key, two), sign in zip(self._two.items(), signs, strict=True)}
            values = self.space.active(drawn)
            if draw == 0:
                values = self.begun(values)
                signs = self._signs_of(values, signs)
            if self.is_new(values) or (draw == 0 and self.may_begin(values)):
                break
            if self.space.is_allowed(values):
                known = signs, values
        else:
            signs, values = known or (signs, values)
            if len(self.terms) >= self.stages:
                self.is_exhausted = True
                return None
            # A stage may propose a point twice: the fit needs its samples.
        if len(self.terms) < self.stages:
            self._signs[self.num_asked] = signs
        return self.propose(values)

    def _signs_of(self, values: Mapping[str, Any], drawn: np.ndarray) -> np.ndarray:
        """Return the signs of a point; those of keys that it does not have are the drawn ones."""
        pairs = zip(self._two.items(), drawn.tolist(), strict=True)
        return np.array([_sign(two[0], values[key]) if key in values else sign for (key, two), sign in pairs])

    def learn(self, observations: Sequence[Observation]) -> bool:
        """Take in trials of earlier searches as samples of the first stage."""
        self._learnt.update(self.key(one.changes) for one in observations)
        for number, one in enumerate(observations[-self.samples :], start=1):
            drawn = rng_of(self.seed, _LEARNT_DRAW, number).choice([-1, 1], size=len(self.space))
            self._signs[-number], self._scores[-number] = self._signs_of(one.changes, drawn), one.score
        if len(self._scores) >= self.samples:
            self._end_stage()
        return True

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return the signs of all bits: fixed ones from one of their best assignments, the others random."""
        signs = rng.choice([-1, 1], size=len(self.space))
        for assignments in self._fixed:
            for bit, sign in assignments[int(rng.integers(len(assignments)))].items():
                signs[bit] = sign
        return signs

    def tell(self, finished: Finished) -> None:
        if finished.trial not in self._signs:
            return
        score = finished.score
        has_failed = finished.status == "failed" or score is None or not math.isfinite(score)
        self._scores[finished.trial] = None if has_failed else score
        if len(self._scores) >= self.samples:
            self._end_stage()

    def _end_stage(self) -> None:
        trials = [trial for trial in sorted(self._scores) if self._scores[trial] is not None]
        fixed = {bit for assignments in self._fixed for bit in assignments[0]}
        free = [bit for bit in range(len(self.space)) if bit not in fixed]
        found: list[Term] = []
        if len(trials) >= 4 and free:
            signs = np.array([self._signs[trial] for trial in trials])[:, free]
            scores = np.array([self._scores[trial] for trial in trials], dtype=float)
            raw = sparse_terms(signs, scores, self.degree, self.num_terms)
            found = [Term(tuple(free[bit] for bit in term.bits), term.coefficient) for term in raw]
        self.terms.append(found)
        self._fixed.append(best_assignments(found, self.keep))
        self._signs, self._scores = {}, {}


def _sign(first: Any, value: Any) -> int:
    """Return 1 for the first of two values, and -1 for the other; 1 and true are two."""
    return 1 if is_among(value, (first,)) else -1

"""The base of the evolving methods: budget, running trials, known scores, and proposals from candidates."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Observation, Proposal, merit, rng_of
from orchestray.search.methods.evolution.variation import Candidate, Individual, Variation

if TYPE_CHECKING:
    from orchestray.search.methods.space import Space

ATTEMPTS = 100
"""Draws in a row that may give known candidates before a space counts as exhausted."""

_START_DRAW = 0x57A
LEARNT = -1
"""Trial of the individuals that are from earlier searches."""


class Evolution(Method):
    """A method that evolves.

    An `ask` that returns None changes nothing: it may be called any number of times.
    """

    def __init__(self, *, population: int = 20, **arguments: Any) -> None:
        """
        Args:
            population: number of individuals alive at a time.
            arguments: those of `Method`; `trials`: None: the method does not end by itself.

        Raises:
            ConfigError: there is nothing to vary, or the population is larger than the budget.
        """
        super().__init__(**arguments)
        if not self.space and self.architecture is None:
            raise ConfigError("there is nothing to evolve: give search.architecture, search.space, or both")
        if population < 1:
            raise ConfigError(f"the population must be at least 1, got {population}")
        if self.trials is not None and population > self.trials:
            raise ConfigError(
                f"a population of {population} is larger than the budget of {self.trials} trials; "
                "lower search.method.population or raise search.budget.trials"
            )
        self.population_size = population
        self.variation = Variation(self.space, self.architecture)
        self.num_proposed = 0
        self.running: dict[int, Candidate] = {}
        self.known: dict[str, Individual] = {}
        """Maps a key to the individual that was evaluated."""
        self.running_keys: dict[str, int] = {}
        """Maps a key to the trial that evaluates it."""
        self._keys: dict[int, str] = {}
        self.is_exhausted = False
        self._start: list[Mapping[str, Any]] = []

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        """Begin the first individuals with these values.

        Raises:
            ConfigError: there are more of them than individuals.
        """
        if len(start) > self.population_size:
            raise ConfigError(
                f"search.start: has {len(start)} trials, and the population {self.population_size} individuals; raise "
                "search.method.population"
            )
        self._start = list(start)
        return True

    def widen(self, space: Space) -> bool:
        self.space = self.variation.space = space
        self.is_exhausted = False
        return True

    def seeded(self, observations: Sequence[Observation]) -> bool:
        """Let the best trials of earlier searches enter the population as individuals, the best last.

        None of them is evaluated again, unless it is one to begin with.
        """
        ordered = sorted(observations, key=lambda one: merit(one.score, one.violation))
        for place, one in enumerate(ordered, start=self.population_size - len(ordered)):
            scores = tuple(one.scores) if len(one.scores) > 1 else ()
            candidate = Candidate(one.genome, dict(one.changes))
            key = self.variation.key(candidate)
            self.known[key] = Individual(LEARNT, one.score, candidate, scores, key, one.violation)
            if place >= 0:
                self.enter(self.known[key])
        return True

    @abstractmethod
    def enter(self, individual: Individual) -> None:
        """Add an individual that has been evaluated to the population."""

    def failed(self, key: str) -> None:
        """Record a trial without a score; by default it is forgotten."""
        del key

    def propose(
        self,
        candidate: Candidate,
        *,
        parent: int | None = None,
        inherits: bool = False,
        change: str = "",
        steps: int | None = None,
        key: str | None = None,
    ) -> Proposal:
        """Return a proposal of a candidate, and record it as running.

        Args:
            candidate: what is tried.
            parent: trial that it was made from.
            inherits: start from the parent's weights.
            change: difference from the parent, in words.
            steps: training steps; None: the budget's.
            key: key of the candidate; None: it is computed.
        """
        trial = self.num_proposed
        if trial < len(self._start):
            rng = rng_of(self.seed, trial, _START_DRAW)
            begun = replace(candidate, changes=self.space.begun(self._start[trial], candidate.changes, rng))
            begun_key = self.variation.key(begun)
            met = self.known.get(begun_key)
            if (met is None or met.trial == LEARNT) and begun_key not in self.running_keys:
                candidate, key = begun, begun_key
        self.num_proposed += 1
        self.running[trial] = candidate
        self._keys[trial] = key = self.variation.key(candidate) if key is None else key
        self.running_keys[key] = trial
        return Proposal(
            trial=trial,
            changes=dict(candidate.changes),
            genome=candidate.genome,
            parent=None if parent == LEARNT else parent,
            inherits=inherits,
            change=change,
            steps=steps,
        )

    def tell(self, finished: Finished) -> None:
        candidate = self.running.pop(finished.trial)
        key = self._keys.pop(finished.trial)
        if self.running_keys.get(key) == finished.trial:
            del self.running_keys[key]
        score = finished.score
        if finished.status == "failed" or score is None or not math.isfinite(score):
            self.failed(key)
            return
        scores = finished.scores if len(finished.scores) > 1 else ()
        individual = Individual(finished.trial, score, candidate, scores, key, finished.violation)
        self.known[key] = individual
        self.enter(individual)

    @property
    def is_spent(self) -> bool:
        """True if the budget allows no more proposals."""
        return self.trials is not None and self.num_proposed >= self.trials

    @property
    def is_done(self) -> bool:
        return self.is_spent or self.is_exhausted

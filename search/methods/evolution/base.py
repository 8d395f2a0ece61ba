"""What the evolving methods share: the budget, what runs, what is known, and how a draw becomes a proposal."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal
from orchestray.search.methods.evolution.variation import Candidate, Individual, Variation

if TYPE_CHECKING:
    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

ATTEMPTS = 100
"""Draws in a row that may give what is known already before a space counts as exhausted."""


class Evolution(Method):
    """A method that evolves.

    An `ask` that returns None changes nothing: it may be called any number of times.
    """

    def __init__(
        self,
        *,
        space: Mapping[str, Dimension],
        architecture: ArchitectureSpace | None = None,
        seed: int = 0,
        trials: int | None = None,
        steps_per_trial: int = 1,
        population: int = 20,
    ) -> None:
        """
        Args:
            space: as of `Method`.
            architecture: as of `Method`.
            seed: as of `Method`.
            trials: how many there may be in all; None: no end of its own.
            steps_per_trial: as of `Method`.
            population: individuals that are alive at a time.

        Raises:
            ConfigError: there is nothing to vary, or the population is larger than the budget.
        """
        super().__init__(
            space=space, architecture=architecture, seed=seed, trials=trials, steps_per_trial=steps_per_trial
        )
        if not space and architecture is None:
            raise ConfigError("there is nothing to evolve: give search.architecture, search.space, or both")
        if population < 1:
            raise ConfigError(f"the population must be at least 1, got {population}")
        if trials is not None and population > trials:
            raise ConfigError(
                f"a population of {population} is larger than the budget of {trials} trials; "
                "lower search.method.population or raise search.budget.trials"
            )
        self.population_size = population
        self.variation = Variation(self.space, architecture)
        self.num_proposed = 0
        self.num_told = 0
        self.running: dict[int, Candidate] = {}
        self.known: dict[str, Individual] = {}
        """By key, what has been evaluated."""
        self.running_keys: dict[str, int] = {}
        """By key, the trial that evaluates it."""
        self._keys: dict[int, str] = {}
        self.is_exhausted = False

    @abstractmethod
    def enter(self, individual: Individual) -> None:
        """Take in an individual that has been evaluated."""

    def failed(self, key: str) -> None:
        """Hear of a trial of that key without a score; default: it is as if it had never been."""
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
        """Make a proposal of a candidate, and remember it; `key`: its own, where that is known already."""
        trial = self.num_proposed
        self.num_proposed += 1
        self.running[trial] = candidate
        self._keys[trial] = key = self.variation.key(candidate) if key is None else key
        self.running_keys[key] = trial
        return Proposal(
            trial=trial,
            changes=dict(candidate.changes),
            genome=candidate.genome,
            parent=parent,
            inherits=inherits,
            change=change,
            steps=steps,
        )

    def tell(self, finished: Finished) -> None:
        candidate = self.running.pop(finished.trial)
        key = self._keys.pop(finished.trial)
        if self.running_keys.get(key) == finished.trial:
            del self.running_keys[key]
        self.num_told += 1
        score = finished.score
        if finished.status == "failed" or score is None or not math.isfinite(score):
            self.failed(key)
            return
        scores = finished.scores if len(finished.scores) > 1 else ()
        individual = Individual(finished.trial, score, candidate, scores, key)
        self.known[key] = individual
        self.enter(individual)

    @property
    def is_spent(self) -> bool:
        """Whether the budget allows no more proposals."""
        return self.trials is not None and self.num_proposed >= self.trials

    @property
    def is_done(self) -> bool:
        return self.is_spent or self.is_exhausted

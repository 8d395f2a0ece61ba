"""Regularised evolution (Real, Aggarwal, Huang and Le, 2019, "Regularized Evolution for Image Classifier Architecture
Search", algorithm 1): the winner of a tournament is mutated, and the oldest individual dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Observation, Proposal, rng_of
from orchestray.search.methods.evolution.base import ATTEMPTS, Evolution
from orchestray.search.methods.evolution.selection import tournament, worst_of
from orchestray.search.methods.evolution.variation import Candidate, Individual

if TYPE_CHECKING:
    import numpy as np

_FOR_ASK, _FOR_REMOVAL = 0, 1
_PATIENCE = 10
"""Known mutants in a row before the next ones are mutated once more: a population on a peak would otherwise only draw
its neighbours again."""


class RegularizedEvolution(Evolution):
    """Aging tournament evolution, asynchronous.

    No worker waits. While the first individuals are evaluated, parents are chosen among those that have ended; if none
    has, another individual is drawn. An individual's age counts from the end of its evaluation.

    With `crossover_probability` it is a genetic algorithm without generations: a child may have a second parent, the
    winner of a tournament of its own, before it is mutated.
    """

    def __init__(
        self,
        *,
        sample_size: int = 5,
        aging: bool = True,
        reuse_scores: bool = True,
        crossover_probability: float = 0.0,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.RegularizedEvolution` and the arguments of `Evolution`."""
        super().__init__(**arguments)
        if sample_size < 1:
            raise ConfigError(f"a tournament needs at least 1 individual, got sample_size {sample_size}")
        self.sample_size = sample_size
        self.aging = aging
        self.reuse_scores = reuse_scores
        self.crossover_probability = crossover_probability
        self.population: list[Individual] = []
        """Individuals alive, the oldest first."""
        self.num_entered = 0
        self.num_tournaments = 0

    def tally(self) -> Mapping[str, Any]:
        """Return the number of tournaments, and the trials alive, the oldest first (-1: of earlier searches)."""
        return {"tournaments": self.num_tournaments, "population": [one.trial for one in self.population]}

    def learn(self, observations: Sequence[Observation]) -> bool:
        return self.seeded(observations)

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        alive, num_entered, num_tournaments = self.population, self.num_entered, self.num_tournaments
        for attempt in range(ATTEMPTS):
            rng = rng_of(self.seed, _FOR_ASK, self.num_proposed, attempt)
            candidate, parent, change = self._draw(rng, num_mutations=1 + attempt // _PATIENCE)
            if not self.reuse_scores:
                return self.propose(candidate, parent=parent, change=change)
            key = self.variation.key(candidate)
            if key in self.known:
                if self.population is alive:
                    self.population = list(alive)
                self.enter(replace(self.known[key], candidate=candidate))
            elif key not in self.running_keys:
                return self.propose(candidate, parent=parent, change=change, key=key)
        for attempt in range(ATTEMPTS, 2 * ATTEMPTS):
            candidate = self.variation.sample(rng_of(self.seed, _FOR_ASK, self.num_proposed, attempt))
            key = self.variation.key(candidate)
            if key not in self.known and key not in self.running_keys:
                return self.propose(candidate, key=key)
        self.population, self.num_entered, self.num_tournaments = alive, num_entered, num_tournaments
        self.is_exhausted = True
        return None

    def _draw(self, rng: np.random.Generator, num_mutations: int) -> tuple[Candidate, int | None, str]:
        is_filling = self.num_entered + len(self.running) < self.population_size
        if is_filling or not self.population:
            return self.variation.sample(rng), None, ""
        parent = self._winner(rng)
        candidate, changes = parent.candidate, []
        if self.crossover_probability and rng.random() < self.crossover_probability:
            other = self._winner(rng)
            candidate = self.variation.crossover(candidate, other.candidate, rng)
            changes.append(f"crossover with trial {other.trial}")
        for _ in range(num_mutations):
            candidate, change = self.variation.mutate(candidate, rng)
            changes.append(change)
        return candidate, parent.trial, ", ".join(changes)

    def _winner(self, rng: np.random.Generator) -> Individual:
        self.num_tournaments += 1
        return tournament(self.population, self.sample_size, rng)

    def enter(self, individual: Individual) -> None:
        self.population.append(individual)
        self.num_entered += 1
        if len(self.population) > self.population_size:
            self._remove_one()

    def _remove_one(self) -> None:
        if self.aging:
            del self.population[0]
            return
        rng = rng_of(self.seed, _FOR_REMOVAL, self.num_entered)
        del self.population[worst_of(self.population, self.sample_size, rng)]

"""Evolution of hierarchical representations (Liu, Simonyan, Vinyals, Fernando and Kavukcuoglu, 2018, "Hierarchical
Representations for Efficient Architecture Search", section 3): a queue of genotypes, tournaments of 5 %, no barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Observation, Proposal, rng_of
from orchestray.search.methods.evolution.base import ATTEMPTS, Evolution
from orchestray.search.methods.evolution.selection import subset_tournament
from orchestray.search.methods.evolution.variation import Candidate, Individual

if TYPE_CHECKING:
    import numpy as np


class HierarchicalEvolution(Evolution):
    """Steady evolution in which no individual dies.

    The first `population` genotypes are mutated many times (section 3.2 of the paper). Each later one is a mutant of
    the winner among a random `tournament_fraction` of all evaluated ones. No worker waits, since there are no
    generations. The method works with any space; the motifs are those of the space `hierarchical`.

    With several objectives, the winner is on the first Pareto front of the tournament and has the fewest others near
    it there (`selection.standings`).
    """

    def __init__(
        self,
        *,
        tournament_fraction: float = 0.05,
        initial_mutations: int = 100,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.HierarchicalEvolution` and the arguments of `Evolution`."""
        super().__init__(**arguments)
        if not 0 < tournament_fraction <= 1:
            raise ConfigError(f"tournament_fraction must be above 0 and at most 1, got {tournament_fraction}")
        self.tournament_fraction = tournament_fraction
        self.initial_mutations = initial_mutations
        self.population: list[Individual] = []
        self._num_learnt = 0

    def learn(self, observations: Sequence[Observation]) -> bool:
        self._num_learnt = len(observations)
        return self.seeded(observations)

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        for attempt in range(ATTEMPTS):
            candidate, parent, change = self._draw(rng_of(self.seed, self.num_proposed, attempt), attempt)
            key = self.variation.key(candidate)
            if key not in self.known and key not in self.running_keys:
                return self.propose(candidate, parent=parent, change=change, key=key)
        self.is_exhausted = True
        return None

    def _draw(self, rng: np.random.Generator, attempt: int) -> tuple[Candidate, int | None, str]:
        """Return a genotype, with more mutations after every ten failed draws, its parent and the change in words."""
        if self.num_proposed + self._num_learnt < self.population_size or not self.population:
            candidate = self.variation.sample(rng)
            for _ in range(self.initial_mutations):
                candidate, _ = self.variation.mutate(candidate, rng)
            return candidate, None, ""
        size = max(2, ceil(self.tournament_fraction * len(self.population)))
        parent = subset_tournament(self.population, size, rng)
        candidate, changes = parent.candidate, []
        for _ in range(1 + attempt // 10):
            candidate, change = self.variation.mutate(candidate, rng)
            changes.append(change)
        return candidate, parent.trial, ", ".join(changes)

    def enter(self, individual: Individual) -> None:
        self.population.append(individual)

"""Evolution of hierarchical representations (Liu, Simonyan, Vinyals, Fernando and Kavukcuoglu, 2018, "Hierarchical
Representations for Efficient Architecture Search", section 3): a queue of genotypes, tournaments of 5 %, no barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.methods.evolution.base import ATTEMPTS, Evolution
from orchestray.search.methods.evolution.selection import subset_tournament
from orchestray.search.methods.evolution.variation import Candidate, Individual

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


class HierarchicalEvolution(Evolution):
    """Steady evolution in which nobody dies.

    The first `population` genotypes are much mutated ones (section 3.2 of the paper); each later one is a mutant of
    the winner among a random `tournament_fraction` of all that have been evaluated. Who asks gets one at once: there
    is no generation to wait for. Works with any space; the motifs are those of the space `hierarchical`.

    With several objectives a tournament is won by who is on the first Pareto front of those that take part, and has the
    fewest others near on it (`selection.standings`).
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
        tournament_fraction: float = 0.05,
        initial_mutations: int = 100,
    ) -> None:
        """
        Args:
            space: as of `Method`.
            architecture: as of `Method`.
            seed: as of `Method`.
            trials: as of `Evolution`.
            steps_per_trial: as of `Method`.
            population: genotypes that are drawn before the first tournament.
            tournament_fraction: of the population, that takes part in a tournament; at least 2 individuals do.
            initial_mutations: random mutations that each of the first genotypes goes through (the paper: 1000).
        """
        super().__init__(
            space=space,
            architecture=architecture,
            seed=seed,
            trials=trials,
            steps_per_trial=steps_per_trial,
            population=population,
        )
        if not 0 < tournament_fraction <= 1:
            raise ConfigError(f"tournament_fraction must be above 0 and at most 1, got {tournament_fraction}")
        self.tournament_fraction = tournament_fraction
        self.initial_mutations = initial_mutations
        self.population: list[Individual] = []

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
        """A genotype; the more draws in vain, the more mutations."""
        if self.num_proposed < self.population_size or not self.population:
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

"""Large-scale evolution (Real et al., 2017, "Large-Scale Evolution of Image Classifiers", section 3): a worker compares
two individuals at random; the worse dies, the better has a mutated child, which starts from its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.methods.evolution.base import ATTEMPTS, Evolution
from orchestray.search.methods.evolution.selection import pair, standings
from orchestray.search.methods.evolution.variation import Candidate, Individual
from orchestray.search.spaces.layer_graph import GrowingSpace

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

_NUM_STRUCTURAL = 8
"""Mutations of the paper that change the network; each hyper-parameter is as likely as one of them."""


class LargeScaleEvolution(Evolution):
    """Pairwise tournaments, asynchronous: no worker waits for another.

    The population grows from one network (the smallest of the space `layer_graph`, a drawn one of any other) until it
    is full; from then on every child costs the loser of its parents' comparison its life. A mutation of the paper that
    leaves the network as it is trains the parent on (`identity`) or anew (`reset weights`), so a network may well be
    evaluated again, with other weights; without `inherit_weights` none is.

    By several objectives the better of two is the one that stands better in the population (`selection.standings`).
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
        inherit_weights: bool = True,
        identity_probability: float = 0.08,
        reset_probability: float = 0.08,
    ) -> None:
        """
        Args:
            space: as of `Method`; "alter learning rate" is a key of it.
            architecture: as of `Method`.
            seed: as of `Method`.
            trials: as of `Evolution`.
            steps_per_trial: as of `Method`.
            population: individuals alive at a time, once so many have grown from the first; at least 2.
            inherit_weights: a child starts from its parent's weights, as far as names and shapes agree.
            identity_probability: that a child is its parent, trained on.
            reset_probability: that a child is its parent with fresh weights.
        """
        super().__init__(
            space=space,
            architecture=architecture,
            seed=seed,
            trials=trials,
            steps_per_trial=steps_per_trial,
            population=population,
        )
        if population < 2:
            raise ConfigError(
                f"large_scale_evolution compares two: the population must be at least 2, got {population}"
            )
        self.inherit_weights = inherit_weights
        self.identity_probability = identity_probability if inherit_weights else 0.0
        self.reset_probability = reset_probability if inherit_weights else 0.0
        self.population: list[Individual] = []
        self.killed: list[int] = []
        """Trials of those that lost, in order."""

    @property
    def hands_on(self) -> bool:
        return self.inherit_weights

    def parents(self) -> Collection[int]:
        return [individual.trial for individual in self.population] if self.inherit_weights else ()

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        rng = rng_of(self.seed, self.num_proposed)
        if not self.population:
            return self._begin(rng)
        parent, loser = self._compare(rng)
        for attempt in range(ATTEMPTS):
            candidate, change, inherits = self._child(parent.candidate, rng, attempt)
            if self.inherit_weights or self._is_new(candidate):
                if loser is not None:
                    self.killed.append(self.population.pop(loser).trial)
                return self.propose(candidate, parent=parent.trial, change=change, inherits=inherits)
        self.is_exhausted = True
        return None

    def _is_new(self, candidate: Candidate) -> bool:
        key = self.variation.key(candidate)
        return key not in self.known and key not in self.running_keys

    def _begin(self, rng: np.random.Generator) -> Proposal | None:
        """The first of all; and, while that is evaluated, mutants of it, with fresh weights."""
        if not self.running:
            first = self.variation.sample(rng)
            genome = self.architecture.trivial() if isinstance(self.architecture, GrowingSpace) else first.genome
            return self.propose(Candidate(genome, first.changes))
        oldest = min(self.running)
        for attempt in range(ATTEMPTS):
            candidate, change = self._mutated(self.running[oldest], rng, attempt)
            if self.inherit_weights or self._is_new(candidate):
                return self.propose(candidate, parent=oldest, change=change)
        return None  # all near it are known; what runs will be a parent

    def _compare(self, rng: np.random.Generator) -> tuple[Individual, int | None]:
        """The better of two, and the place of the worse, if it is to die."""
        if len(self.population) < 2:
            return self.population[0], None
        first, second = pair(len(self.population), rng)
        standing = standings(self.population)
        if standing[first] < standing[second]:
            first, second = second, first
        is_growing = len(self.population) + len(self.running) < self.population_size
        return self.population[first], None if is_growing else second

    def _child(self, parent: Candidate, rng: np.random.Generator, attempt: int) -> tuple[Candidate, str, bool]:
        """A candidate, what was done, and whether it takes the parent's weights."""
        draw = rng.random()
        if draw < self.identity_probability:
            return parent, "identity", True
        if draw < self.identity_probability + self.reset_probability:
            return parent, "reset weights", False
        candidate, change = self._mutated(parent, rng, attempt)
        return candidate, change, self.inherit_weights

    def _mutated(self, parent: Candidate, rng: np.random.Generator, attempt: int) -> tuple[Candidate, str]:
        """A mutant; after ten draws in vain of two mutations, and so on."""
        candidate, changes = parent, []
        for _ in range(1 + attempt // 10):
            candidate, change = self._mutated_once(candidate, rng)
            changes.append(change)
        return candidate, ", ".join(changes)

    def _mutated_once(self, parent: Candidate, rng: np.random.Generator) -> tuple[Candidate, str]:
        chance = len(self.space) / (len(self.space) + _NUM_STRUCTURAL)
        if isinstance(self.architecture, GrowingSpace) and rng.random() >= chance:
            genome, change = self.architecture.alter(parent.genome, rng)
            return Candidate(genome, parent.changes), change
        if isinstance(self.architecture, GrowingSpace):
            changes = self.variation.perturb_one(parent.changes, rng)
            said = ", ".join(f"alter {key}" for key in changes if changes[key] != parent.changes[key])
            return Candidate(parent.genome, changes), said or "identity"
        return self.variation.mutate(parent, rng)

    def enter(self, individual: Individual) -> None:
        self.population.append(individual)

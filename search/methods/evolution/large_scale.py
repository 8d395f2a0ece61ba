"""Large-scale evolution (Real et al., 2017, "Large-Scale Evolution of Image Classifiers", section 3): a worker compares
two random individuals; the worse dies, the better has a mutated child, which starts from its weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.methods.evolution.base import ATTEMPTS, Evolution
from orchestray.search.methods.evolution.selection import pair, standings
from orchestray.search.methods.evolution.variation import Candidate, Individual
from orchestray.search.spaces.architectures.layer_graph import GrowingSpace

if TYPE_CHECKING:
    import numpy as np

_NUM_STRUCTURAL = 8
"""Mutations of the paper that change the network; each hyper-parameter is as likely as one of them."""


class LargeScaleEvolution(Evolution):
    """Pairwise tournaments, asynchronous: no worker waits for another.

    The population grows from one network (the smallest of the space `layer_graph`, a random one of any other) until it
    is full. Every later child replaces the loser of the comparison that chose its parent. Two mutations of the paper
    leave the network unchanged: `identity` trains the parent further, and `reset weights` trains it from scratch. So a
    network may be evaluated again, with other weights; without `inherit_weights` none is.

    With several objectives, the individual with the better standing in the population wins (`selection.standings`).
    """

    def __init__(
        self,
        *,
        population: int = 20,
        inherit_weights: bool = True,
        identity_probability: float = 0.08,
        reset_probability: float = 0.08,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.LargeScaleEvolution` and the arguments of `Evolution`.

        The paper's mutation "alter learning rate" is a key of `space`.
        """
        super().__init__(population=population, **arguments)
        if population < 2:
            raise ConfigError(
                f"large_scale_evolution compares two: the population must be at least 2, got {population}"
            )
        self.inherit_weights = inherit_weights
        self.identity_probability = identity_probability if inherit_weights else 0.0
        self.reset_probability = reset_probability if inherit_weights else 0.0
        self.population: list[Individual] = []
        self.killed: list[int] = []
        """Trials of the individuals that lost, in order."""

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
        """Return the first network or, while that is evaluated, a mutant of it with fresh weights."""
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
        """Return the better of two random individuals, and the index of the worse or, in a growing population, None."""
        if len(self.population) < 2:
            return self.population[0], None
        first, second = pair(len(self.population), rng)
        standing = standings(self.population)
        if standing[first] < standing[second]:
            first, second = second, first
        is_growing = len(self.population) + len(self.running) < self.population_size
        return self.population[first], None if is_growing else second

    def _child(self, parent: Candidate, rng: np.random.Generator, attempt: int) -> tuple[Candidate, str, bool]:
        """Return a candidate, the change in words, and True if it takes the parent's weights."""
        draw = rng.random()
        if draw < self.identity_probability:
            return parent, "identity", True
        if draw < self.identity_probability + self.reset_probability:
            return parent, "reset weights", False
        candidate, change = self._mutated(parent, rng, attempt)
        return candidate, change, self.inherit_weights

    def _mutated(self, parent: Candidate, rng: np.random.Generator, attempt: int) -> tuple[Candidate, str]:
        """Return a mutant: of two mutations after ten failed draws, of three after twenty, and so on."""
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
            described = ", ".join(f"alter {key}" for key in changes if changes[key] != parent.changes.get(key))
            return Candidate(parent.genome, changes), described or "identity"
        return self.variation.mutate(parent, rng)

    def enter(self, individual: Individual) -> None:
        self.population.append(individual)

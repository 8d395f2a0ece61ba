"""What the methods share whose generations wait for all scores of the one before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orchestray.search.methods.evolution.base import Evolution
from orchestray.search.methods.evolution.selection import standings_of

if TYPE_CHECKING:
    from orchestray.search.methods.base import Proposal
    from orchestray.search.methods.evolution.variation import Candidate, Individual


class Generational(Evolution):
    """Generation after generation; what is known takes its scores along and is not evaluated again.

    Order free: a generation depends on all scores of the one before, not on the order in which they came.
    """

    is_order_free: ClassVar[bool] = True
    most_generations: ClassVar[int]
    """Generations in a row that bring nothing new before the space counts as exhausted."""

    def __init__(self, **arguments: Any) -> None:
        """Arguments as of `Evolution`."""
        super().__init__(**arguments)
        self.generation = 0
        self.trial_of: dict[str, int] = {}
        """By key, the trial that a member was or is evaluated by."""
        self.scores: dict[str, tuple[float, ...] | None] = {}
        """By key, one score or several; None for what has failed."""

    @property
    @abstractmethod
    def generation_keys(self) -> Sequence[str]:
        """The keys of the members of the present generation."""

    @abstractmethod
    def propose_member(self, index: int) -> Proposal:
        """Make a proposal of a member of the present generation."""

    @abstractmethod
    def next_generation(self, fitness: Sequence[float]) -> None:
        """Make the next generation.

        Args:
            fitness: of each member of the present one; see `fitness`.
        """

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        for _ in range(self.most_generations):
            for index, key in enumerate(self.generation_keys):
                if key not in self.trial_of:
                    self.trial_of[key] = self.num_proposed
                    return self.propose_member(index)
            if self.running:
                return None
            fitness = self.fitness()
            self.generation += 1
            self.next_generation(fitness)
        self.is_exhausted = True
        return None

    def enter(self, individual: Individual) -> None:
        self.scores[self.variation.key(individual.candidate)] = individual.scores or (individual.score,)

    def failed(self, trial: int, candidate: Candidate) -> None:
        self.scores[self.variation.key(candidate)] = None

    def fitness(self) -> list[float]:
        """How good each member of the present generation is: its score, or by several how it stands among them.

        What has failed is as bad as the worst; 0 where all have.
        """
        keys = self.generation_keys
        known = {key: scores for key in keys if (scores := self.scores[key]) is not None}
        if not known:
            return [0.0] * len(keys)
        standing = standings_of(np.array(list(known.values())))
        fitness = dict(zip(known, standing.tolist(), strict=True))
        return [fitness.get(key, min(fitness.values())) for key in keys]

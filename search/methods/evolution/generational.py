"""What the methods share whose generations wait for all scores of the one before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from orchestray.search.methods.evolution.base import Evolution
from orchestray.search.methods.evolution.selection import standings_of

if TYPE_CHECKING:
    from orchestray.search.methods.base import Proposal
    from orchestray.search.methods.evolution.variation import Candidate, Individual


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate of a generation, and where it comes from."""

    candidate: Candidate
    key: str
    """Under which its score is known."""
    parent: int | None = None
    """The trial it was made from."""
    change: str = ""
    """What was done to that, in words."""


_Member = TypeVar("_Member", bound=Member)


class Generational(Evolution, Generic[_Member]):
    """Generation after generation; what is known takes its scores along and is not evaluated again.

    Order free: a generation depends on all scores of the one before, not on the order in which they came.
    """

    is_order_free: ClassVar[bool] = True
    most_generations: ClassVar[int]
    """Generations in a row that bring nothing new before the space counts as exhausted."""
    steps_of_member: ClassVar[int | None] = None
    """That each is trained; None: the budget's; 0: it is only validated."""
    members: list[_Member]
    """The present generation."""

    def __init__(self, **arguments: Any) -> None:
        """Arguments as of `Evolution`."""
        super().__init__(**arguments)
        self.generation = 0
        self.trial_of: dict[str, int] = {}
        """By key, the trial that evaluates a member, or has evaluated its like."""
        self.scores: dict[str, tuple[float, ...] | None] = {}
        """By key, one score or several; None for what has failed."""

    @abstractmethod
    def next_generation(self, fitness: Sequence[float]) -> list[_Member]:
        """Make the next generation.

        Args:
            fitness: of each member of the present one; see `fitness`.
        """

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        for _ in range(self.most_generations):
            for member in self.members:
                if member.key not in self.trial_of:
                    self.trial_of[member.key] = self.num_proposed
                    return self.propose(
                        member.candidate,
                        parent=member.parent,
                        change=member.change,
                        steps=self.steps_of_member,
                        key=member.key,
                    )
            if self.running:
                return None
            fitness = self.fitness()
            self.generation += 1
            self.members = self.next_generation(fitness)
        self.is_exhausted = True
        return None

    def enter(self, individual: Individual) -> None:
        self.scores[individual.key] = individual.scores or (individual.score,)

    def failed(self, key: str) -> None:
        self.scores[key] = None

    def fitness(self) -> list[float]:
        """How good each member of the present generation is: its score, or by several how it stands among them.

        What has failed is as bad as the worst; 0 where all have.
        """
        keys = [member.key for member in self.members]
        known = {key: scores for key in keys if (scores := self.scores[key]) is not None}
        if not known:
            return [0.0] * len(keys)
        standing = standings_of(np.array(list(known.values())))
        fitness = dict(zip(known, standing.tolist(), strict=True))
        return [fitness.get(key, min(fitness.values())) for key in keys]

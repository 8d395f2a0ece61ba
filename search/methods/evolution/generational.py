"""The base of methods whose generations wait for all scores of the previous one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from orchestray.search.methods.evolution.base import Evolution
from orchestray.search.methods.fronts import standings_of

if TYPE_CHECKING:
    from orchestray.search.methods.base import Proposal
    from orchestray.search.methods.evolution.variation import Candidate, Individual
    from orchestray.search.methods.space import Space


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate of a generation, with its origin."""

    candidate: Candidate
    key: str
    """Key of its score."""
    parent: int | None = None
    """The trial it was made from."""
    change: str = ""
    """Difference from the parent, in words."""


_Member = TypeVar("_Member", bound=Member)


class Generational(Evolution, Generic[_Member]):
    """A method of generations; a known candidate keeps its scores and is not evaluated again.

    Order-free: a generation depends on all scores of the previous one, not on the order in which they arrived.
    """

    is_order_free: ClassVar[bool] = True
    most_generations: ClassVar[int]
    """Generations in a row without a new candidate before the space counts as exhausted."""
    steps_of_member: ClassVar[int | None] = None
    """Training steps of each member; None: the budget's; 0: it is only validated."""
    members: list[_Member]
    """The current generation."""

    def __init__(self, **arguments: Any) -> None:
        """Take the arguments of `Evolution`."""
        super().__init__(**arguments)
        self.generation = 0
        self.trial_of: dict[str, int] = {}
        """Maps a key to the trial that evaluates, or has evaluated, a member with this key."""
        self.scores: dict[str, tuple[float, ...] | None] = {}
        """Maps a key to one score or several; None if the trial failed."""
        self.violations: dict[str, float] = {}
        """Maps a key to the sum of the bounds that its trial breaks."""

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        return False  # the first generation is made of parts, or of bits

    def widen(self, space: Space) -> bool:
        return False

    @abstractmethod
    def next_generation(self, fitness: Sequence[float]) -> list[_Member]:
        """Return the next generation.

        Args:
            fitness: fitness of each member of the current generation; see `fitness`.
        """

    def tally(self) -> Mapping[str, Any]:
        return {"generation": self.generation}

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
        self.violations[individual.key] = individual.violation

    def failed(self, key: str) -> None:
        self.scores[key] = None

    def fitness(self) -> list[float]:
        """Return the fitness of each member of the current generation.

        It is the score; with several objectives it is the standing in the generation (`fronts.standings_of`).
        Failed members have the fitness of the worst, or 0 if all failed.
        """
        keys = [member.key for member in self.members]
        known = {key: scores for key in keys if (scores := self.scores[key]) is not None}
        if not known:
            return [0.0] * len(keys)
        violations = np.array([self.violations[key] for key in known])
        standing = standings_of(np.array(list(known.values())), violations)
        fitness = dict(zip(known, standing.tolist(), strict=True))
        return [fitness.get(key, min(fitness.values())) for key in keys]

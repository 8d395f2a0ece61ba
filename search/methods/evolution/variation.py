"""The candidates that evolution varies: an architecture, hyper-parameters, or both at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.search.methods.space import Space
from orchestray.search.spaces.architectures.base import key_of, plain_key

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.architectures.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


_TRIES = 8
"""Draws of another value before one stays the same."""


@dataclass(frozen=True)
class Candidate:
    """The genome and the hyper-parameters of a trial, as JSON values."""

    genome: Any = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted config keys and their values."""


@dataclass(frozen=True)
class Individual:
    """A candidate that has been evaluated."""

    trial: int
    score: float
    candidate: Candidate
    scores: tuple[float, ...] = ()
    """Scores by all objectives, `score` first; empty with one objective."""
    key: str = ""
    """Key of the candidate."""
    violation: float = 0.0
    """Sum of the bounds that it breaks; 0 if it is feasible."""


class Variation:
    """The drawing, mutation and crossover of candidates of an architecture space and a space of hyper-parameters."""

    def __init__(self, space: Mapping[str, Dimension], architecture: ArchitectureSpace | None) -> None:
        self.space = Space.of(space)
        self.architecture = architecture

    def sample(self, rng: np.random.Generator) -> Candidate:
        """Draw a candidate."""
        genome = None if self.architecture is None else self.architecture.sample(rng)
        return Candidate(genome, self.space.sample(rng))

    def mutate(self, candidate: Candidate, rng: np.random.Generator) -> tuple[Candidate, str]:
        """Change one thing: with equal probability the genome or one hyper-parameter, if both are searched.

        Returns:
            The mutant, and the change in words.
        """
        if self.architecture is not None and (not self.space or rng.random() < 0.5):
            genome = self.architecture.mutate(candidate.genome, rng)
            return Candidate(genome, candidate.changes), difference(candidate.genome, genome)
        changes = self.perturb_one(candidate.changes, rng)
        return Candidate(candidate.genome, changes), difference(candidate.changes, changes)

    def perturb_one(self, changes: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the values with one hyper-parameter moved to a value nearby."""
        keys = [key for key in self.space if key in changes]
        key = keys[int(rng.integers(len(keys)))]
        for _ in range(_TRIES):  # values without an order are drawn again, and may be drawn as they were
            moved = self.space[key].perturb(changes[key], rng)
            made = self.space.completed({**changes, key: moved}, rng)
            if moved != changes[key] and self.space.is_allowed(made):
                return made
        return dict(changes)

    def crossover(self, a: Candidate, b: Candidate, rng: np.random.Generator) -> Candidate:
        """Return the space's crossover of two genomes, with each hyper-parameter from either with equal probability."""
        genome = None if self.architecture is None else self.architecture.crossover(a.genome, b.genome, rng)
        mixed = {}
        for key in self.space:
            one, other = (a, b) if rng.random() < 0.5 else (b, a)
            if key in one.changes or key in other.changes:  # a key that only one parent has comes from that one
                mixed[key] = one.changes[key] if key in one.changes else other.changes[key]
        changes = self.space.completed(mixed, rng)
        return Candidate(genome, changes if self.space.is_allowed(changes) else a.changes)

    def key(self, candidate: Candidate) -> str:
        """Return the key under which the candidate's score is stored."""
        genome = "" if self.architecture is None else key_of(self.architecture, candidate.genome)
        return f"{genome}/{plain_key(dict(candidate.changes))}" if self.space else genome


_MOST_DIFFERENCES = 3


def difference(before: Any, after: Any) -> str:
    """Describe the change of a genome or of hyper-parameters in words: at most three of the entries that differ."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return "mutation" if before != after else "unchanged"
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changes = [f"{name}: {_short(before.get(name))} -> {_short(after.get(name))}" for name in names[:_MOST_DIFFERENCES]]
    rest = len(names) - len(changes)
    return ", ".join(changes) + (f" and {rest} more" if rest else "") if changes else "unchanged"


def _short(value: Any, width: int = 24) -> str:
    written = json.dumps(value)
    return written if len(written) <= width else written[: width - 3] + "..."

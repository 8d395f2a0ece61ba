"""A small language for spaces: a program that chooses, in the spirit of DeepArchitect (Negrinho and Gordon, 2017).

A space is written as one method, `compose(choose)`, which calls `choose(name, options)` as often as it likes; which
choices come later may depend on what was chosen before. A genome is what was chosen: a mapping of names to options.
From the one program follow drawing, changing one choice, mixing two genomes, counting, and walking all of them; and
methods that learn (a controller, Q-learning, a surrogate) answer the choices in place of a random generator.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestray.search.spaces.base import BuiltInSpace, Genome

Choose = Callable[[str, Sequence[Any]], Any]
"""Given the name of a choice and its options (JSON scalars) returns one of them."""


@dataclass(frozen=True)
class Decision:
    """One choice as it was made."""

    name: str
    options: tuple[Any, ...]
    index: int

    @property
    def value(self) -> Any:
        return self.options[self.index]


class ChoiceSpace(BuiltInSpace):
    """A space that is a program of choices."""

    @abstractmethod
    def compose(self, choose: Choose) -> None:
        """Choose everything that makes a network; each name once."""

    def decide(self, pick: Callable[[str, Sequence[Any]], int]) -> list[Decision]:
        """Run the program, with `pick` answering each choice by the index of an option."""
        decisions: list[Decision] = []

        def choose(name: str, options: Sequence[Any]) -> Any:
            decisions.append(Decision(name, tuple(options), pick(name, options)))
            return decisions[-1].value

        self.compose(choose)
        return decisions

    def genome_of(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """What was chosen, by name."""
        return {decision.name: decision.value for decision in decisions}

    def decisions_of(self, genome: Mapping[str, Any]) -> list[Decision]:
        """The choices that make a genome."""
        return self.decide(lambda name, options: list(options).index(genome[name]))

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        return self.genome_of(self.decide(lambda _name, options: int(rng.integers(len(options)))))

    def mutate(self, genome: Genome, rng: np.random.Generator) -> dict[str, Any]:
        """Change one choice that has another option; choices that come up by it are drawn, those left out go."""
        free = [decision for decision in self.decisions_of(genome) if len(decision.options) > 1]
        if not free:
            return dict(genome)
        changed = free[int(rng.integers(len(free)))]
        others = [index for index in range(len(changed.options)) if index != changed.index]
        other = others[int(rng.integers(len(others)))]

        def pick(name: str, options: Sequence[Any]) -> int:
            return other if name == changed.name else _kept(genome, name, options, rng)

        return self.genome_of(self.decide(pick))

    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> dict[str, Any]:
        """Each choice from one or the other parent, evenly, where it can be."""

        def pick(name: str, options: Sequence[Any]) -> int:
            first, second = (a, b) if rng.random() < 0.5 else (b, a)
            return _kept(first if name in first and first[name] in options else second, name, options, rng)

        return self.genome_of(self.decide(pick))

    def enumerate(self) -> Iterator[dict[str, Any]]:
        """Every genome, once each, in the order of the options."""
        path: list[int] | None = []
        while path is not None:
            decisions = self._along(path)
            yield self.genome_of(decisions)
            path = _next_path(decisions)

    def _along(self, path: Sequence[int]) -> list[Decision]:
        """The choices made by these indices, and by the first option where they end."""
        indices = iter(path)
        return self.decide(lambda _name, _options: next(indices, 0))


def _next_path(decisions: Sequence[Decision]) -> list[int] | None:
    """The indices that come after these, the last choice turning fastest; None after the last of all."""
    indices = [decision.index for decision in decisions]
    for place in reversed(range(len(indices))):
        if indices[place] + 1 < len(decisions[place].options):
            return [*indices[:place], indices[place] + 1]
    return None


def _kept(genome: Mapping[str, Any], name: str, options: Sequence[Any], rng: np.random.Generator) -> int:
    """The index of a genome's own choice where it has made it, among these options; else a draw."""
    listed = list(options)
    return listed.index(genome[name]) if genome.get(name, _NOTHING) in listed else int(rng.integers(len(listed)))


_NOTHING = object()

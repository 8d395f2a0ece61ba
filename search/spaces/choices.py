"""A small language for spaces: a program that chooses, in the spirit of DeepArchitect (Negrinho and Gordon, 2017).

A space is written as one method, `compose(choose)`, which calls `choose(name, options)` as often as it likes; which
choices come later may depend on what was chosen before. A genome is what was chosen: a mapping of names to options.
From the one program follow drawing, changing one choice, mixing two genomes, counting, and walking all of them; and
methods that learn (a controller, Q-learning, a surrogate) answer the choices in place of a random generator.

Where `compose` also writes the network, as a `Draft`, nothing else is needed:

>>> import numpy as np, torch
>>> from orchestray.search.spaces.choices import ComposedSpace
>>> from orchestray.search.spaces.plan import INPUT, Draft
>>> class Towers(ComposedSpace):
...     def compose(self, choose):
...         draft, value = Draft(), INPUT
...         for layer in range(choose("depth", [1, 2])):
...             value = draft.step("conv", value, channels=choose(f"channels{layer}", [8, 16]), kernel=3)
...         return draft.plan(value)
>>> space = Towers()
>>> space.count()
6
>>> space.text({"depth": 2, "channels0": 8, "channels1": 16})
'conv 3x3 8, conv 3x3 16, global average, linear'
>>> tuple(space.build(space.sample(np.random.default_rng(0)), [1, 8, 8], 10)(torch.zeros(2, 1, 8, 8)).shape)
(2, 10)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.base import BuiltInSpace, Genome, Graph, Node
from orchestray.search.spaces.plan import Plan
from orchestray.search.spaces.planned import PlannedSpace

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


@dataclass(frozen=True)
class _Read:
    """A genome as it was read."""

    genome: Genome
    chosen: Mapping[str, Any]
    """A copy, since whoever has the genome may write to it."""
    decisions: list[Decision]
    free: list[int]
    """The places of choices that have another option."""

    @staticmethod
    def of(genome: Genome, chosen: Mapping[str, Any], decisions: list[Decision]) -> _Read:
        free = [place for place, decision in enumerate(decisions) if len(decision.options) > 1]
        return _Read(genome, chosen, decisions, free)


class ChoiceSpace(BuiltInSpace):
    """A space that is a program of choices. Of a subclass `compose` and `build` are wanted."""

    makes_the_same_choices: ClassVar[bool] = False
    """Whether each genome makes the same choices out of the same options, whatever was chosen before: then genomes are
    drawn, and one choice is changed, without running the program."""
    _reads: dict[int, _Read] | None = None
    """Of the genomes that were changed last, by their identity: methods change a few many times over."""
    _table: tuple[list[list[Decision]], np.ndarray] | None = None
    """Each way to make each choice, and how many there are, where all genomes make the same choices."""

    @abstractmethod
    def compose(self, choose: Choose) -> Any:
        """Choose everything that makes a network; each name once. What is returned is a subclass's business."""

    def decide(self, pick: Callable[[str, Sequence[Any]], int]) -> list[Decision]:
        """Run the program, with `pick` answering each choice by the index of an option."""
        decisions: list[Decision] = []

        def choose(name: str, options: Sequence[Any]) -> Any:
            decisions.append(Decision(name, tuple(options), pick(name, options)))
            return decisions[-1].value

        self.answer(choose)
        return decisions

    def answer(self, choose: Choose) -> Any:
        """Make the choices alone, the same as in `compose`: for a space that takes long to write its networks."""
        return self.compose(choose)

    def genome_of(self, decisions: Sequence[Decision]) -> Genome:
        """What was chosen, by name. A subclass may write it otherwise, and then reads it in `chosen_in`."""
        return {decision.name: decision.options[decision.index] for decision in decisions}  # called often: no property

    def chosen_in(self, genome: Genome) -> Mapping[str, Any]:
        """What was chosen in a genome, by name: the reverse of `genome_of`.

        Raises:
            ConfigError: that is no genome of this space.
        """
        if not isinstance(genome, Mapping):
            raise ConfigError(f"a genome of this space is a mapping of choices to options, got {genome!r}")
        return genome

    def decisions_of(self, genome: Genome) -> list[Decision]:
        """The choices that make a genome.

        Raises:
            ConfigError: it lacks a choice, makes one that does not come up, or one that is not among the options.
        """
        return self.decide(self._answers(genome))

    def sample(self, rng: np.random.Generator) -> Genome:
        if not self.makes_the_same_choices:
            return self.genome_of(self.decide(lambda _name, options: int(rng.integers(len(options)))))
        table, counts = self._all_ways()
        indices = rng.integers(counts).tolist()  # the same as one call a choice
        return self.genome_of([ways[index] for ways, index in zip(table, indices, strict=True)])

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change one choice that has another option; choices that come up by it are drawn, those left out go."""
        read = self._read(genome)
        if not read.free:
            return genome
        decisions, place = read.decisions, read.free[int(rng.integers(len(read.free)))]
        changed = decisions[place]
        others = [index for index in range(len(changed.options)) if index != changed.index]
        other = others[int(rng.integers(len(others)))]
        if self.makes_the_same_choices:
            made = self._all_ways()[0][place][other]
            return self.genome_of([*decisions[:place], made, *decisions[place + 1 :]])
        chosen = self.chosen_in(genome)

        def pick(name: str, options: Sequence[Any]) -> int:
            return other if name == changed.name else _kept(chosen, name, options, rng)

        return self.genome_of(self.decide(pick))

    def _all_ways(self) -> tuple[list[list[Decision]], np.ndarray]:
        if self._table is None:
            table = [
                [Decision(made.name, made.options, index) for index in range(len(made.options))]
                for made in self._along(())
            ]
            self._table = table, np.array([len(ways) for ways in table])
        return self._table

    def _read(self, genome: Genome) -> _Read:
        """The choices of a genome; where that is allowed the program is not run again for one of the last genomes."""
        if not self.makes_the_same_choices:
            return _Read.of(genome, {}, self.decisions_of(genome))
        self._reads = self._reads or {}
        read, chosen = self._reads.get(id(genome)), self.chosen_in(genome)
        if read is None or read.genome is not genome or read.chosen != chosen:
            if len(self._reads) == _NUM_READS:
                self._reads.clear()
            read = self._reads[id(genome)] = _Read.of(genome, dict(chosen), self.decisions_of(genome))
        return read

    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> Genome:
        """Each choice from one or the other parent, evenly, where it can be."""
        of_a, of_b = self.chosen_in(a), self.chosen_in(b)

        def pick(name: str, options: Sequence[Any]) -> int:
            first, second = (of_a, of_b) if rng.random() < 0.5 else (of_b, of_a)
            return _kept(first if name in first and first[name] in options else second, name, options, rng)

        return self.genome_of(self.decide(pick))

    def enumerate(self) -> Iterator[Genome]:
        """Every genome, once each, in the order of the options."""
        path: list[int] | None = []
        while path is not None:
            decisions = self._along(path)
            yield self.genome_of(decisions)
            path = _next_path(decisions)

    def count(self) -> int:
        """How many genomes there are. As it comes, by walking them all: a large space says it in a formula."""
        return sum(1 for _ in self.enumerate())

    def graph(self, genome: Genome) -> Graph:
        """The choices one after the other; a space that knows its network's layers says better."""
        nodes = tuple(Node(made.name, f"{made.name}: {made.value}") for made in self.decisions_of(genome))
        return Graph(nodes, tuple((index, index + 1) for index in range(len(nodes) - 1)))

    def _answers(self, genome: Genome) -> Callable[[str, Sequence[Any]], int]:
        chosen = self.chosen_in(genome)

        def pick(name: str, options: Sequence[Any]) -> int:
            if name not in chosen:
                raise ConfigError(f"the genome {genome!r} lacks the choice {name!r}, one of {list(options)}")
            if chosen[name] not in options:
                raise ConfigError(f"{name} must be one of {list(options)}, and is {chosen[name]!r} in {genome!r}")
            return options.index(chosen[name])

        return pick

    def _along(self, path: Sequence[int]) -> list[Decision]:
        """The choices made by these indices, and by the first option where they end."""
        indices = iter(path)
        return self.decide(lambda _name, _options: next(indices, 0))


class ComposedSpace(PlannedSpace, ChoiceSpace):
    """A program of choices that writes the network on the way. Of a subclass only `compose` is wanted."""

    @abstractmethod
    def compose(self, choose: Choose) -> Plan:
        """Choose everything that makes a network, each name once, and return its plan."""

    def plan(self, genome: Genome) -> Plan:
        pick = self._answers(genome)
        used = set()

        def choose(name: str, options: Sequence[Any]) -> Any:
            used.add(name)
            return options[pick(name, options)]

        plan = self.compose(choose)
        if surplus := sorted(set(self.chosen_in(genome)) - used):
            raise ConfigError(f"the genome {genome!r} makes choices that do not come up: {', '.join(surplus)}")
        return plan


def _next_path(decisions: Sequence[Decision]) -> list[int] | None:
    """The indices that come after these, the last choice turning fastest; None after the last of all."""
    indices = [decision.index for decision in decisions]
    for place in reversed(range(len(indices))):
        if indices[place] + 1 < len(decisions[place].options):
            return [*indices[:place], indices[place] + 1]
    return None


def _kept(chosen: Mapping[str, Any], name: str, options: Sequence[Any], rng: np.random.Generator) -> int:
    """The index of a genome's own choice where it has made it, among these options; else a draw."""
    value = chosen.get(name, _NOTHING)
    return options.index(value) if value in options else int(rng.integers(len(options)))


_NOTHING = object()
_NUM_READS = 64

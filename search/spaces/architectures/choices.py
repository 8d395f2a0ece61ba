"""A small language for spaces: a program of choices, in the spirit of DeepArchitect (Negrinho and Gordon, 2017).

A space is written as one method, `compose(choose)`, which calls `choose(name, options)` any number of times. Later
choices may depend on earlier ones. A genome maps the names of the choices to the chosen options. Sampling, mutation,
crossover, counting and enumeration all follow from this one program. Learning methods (a controller, Q-learning, a
surrogate) answer the choices instead of a random generator.

Where `compose` also writes the network, as a `Draft`, nothing else is needed:

>>> import numpy as np, torch
>>> from orchestray.search.spaces.architectures.choices import ComposedSpace
>>> from orchestray.search.spaces.architectures.plan import INPUT, Draft
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
from orchestray.search.spaces.architectures.base import BuiltInSpace, Genome, Graph, Node
from orchestray.search.spaces.architectures.plan import Plan
from orchestray.search.spaces.architectures.planned import PlannedSpace

Choose = Callable[[str, Sequence[Any]], Any]
"""Function that takes the name of a choice and its options (JSON scalars) and returns one of the options."""


@dataclass(frozen=True)
class Decision:
    """A choice with its options and the index of the chosen one."""

    name: str
    options: tuple[Any, ...]
    index: int

    @property
    def value(self) -> Any:
        return self.options[self.index]


@dataclass(frozen=True)
class _Read:
    """A genome with its decoded choices."""

    genome: Genome
    chosen: Mapping[str, Any]
    """Copy of the choices, since the caller may modify the genome."""
    decisions: list[Decision]
    free: list[int]
    """Positions of the choices that have another option."""

    @staticmethod
    def of(genome: Genome, chosen: Mapping[str, Any], decisions: list[Decision]) -> _Read:
        free = [place for place, decision in enumerate(decisions) if len(decision.options) > 1]
        return _Read(genome, chosen, decisions, free)


class ChoiceSpace(BuiltInSpace):
    """A space defined by a program of choices. Subclasses implement `compose` and `build`."""

    makes_the_same_choices: ClassVar[bool] = False
    """True if each genome makes the same choices from the same options, whatever was chosen before. Genomes can then be
    drawn, and single choices changed, without running the program.
    """
    _reads: dict[int, _Read] | None = None
    """Cache of recently mutated genomes, by object identity: methods mutate a few genomes many times."""
    _table: tuple[list[list[Decision]], np.ndarray] | None = None
    """Options of each choice and their number, where all genomes make the same choices."""

    @abstractmethod
    def compose(self, choose: Choose) -> Any:
        """Make all choices that define a network, each name once. The meaning of the returned value is up to the
        subclass.
        """

    def decide(self, pick: Callable[[str, Sequence[Any]], int]) -> list[Decision]:
        """Run the program; `pick` answers each choice with the index of an option."""
        decisions: list[Decision] = []

        def choose(name: str, options: Sequence[Any]) -> Any:
            decisions.append(Decision(name, tuple(options), pick(name, options)))
            return decisions[-1].value

        self.answer(choose)
        return decisions

    def answer(self, choose: Choose) -> Any:
        """Make the choices of `compose` only: for spaces that take long to write their networks."""
        return self.compose(choose)

    def genome_of(self, decisions: Sequence[Decision]) -> Genome:
        """Return the chosen options by name. A subclass may use another format, which its `chosen_in` reads."""
        return {decision.name: decision.options[decision.index] for decision in decisions}  # called often: no property

    def chosen_in(self, genome: Genome) -> Mapping[str, Any]:
        """Return the chosen options of a genome by name: the reverse of `genome_of`.

        Raises:
            ConfigError: the genome does not belong to this space.
        """
        if not isinstance(genome, Mapping):
            raise ConfigError(f"a genome of this space is a mapping of choices to options, got {genome!r}")
        return genome

    def decisions_of(self, genome: Genome) -> list[Decision]:
        """Return the decisions that make up a genome.

        Raises:
            ConfigError: the genome lacks a choice, has one that does not occur, or an option that is not available.
        """
        return self.decide(self._answers(genome))

    def sample(self, rng: np.random.Generator) -> Genome:
        if not self.makes_the_same_choices:
            return self.genome_of(self.decide(lambda _name, options: int(rng.integers(len(options)))))
        table, counts = self._all_ways()
        indices = rng.integers(counts).tolist()  # the same draws as with one call per choice
        return self.genome_of([ways[index] for ways, index in zip(table, indices, strict=True)])

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change one choice that has another option; draw choices that this adds, and drop those it removes."""
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
        """Return the choices of a genome, cached for recent genomes if all genomes make the same choices."""
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
        """Take each choice from either parent with equal probability, where it is available."""
        of_a, of_b = self.chosen_in(a), self.chosen_in(b)

        def pick(name: str, options: Sequence[Any]) -> int:
            first, second = (of_a, of_b) if rng.random() < 0.5 else (of_b, of_a)
            return _kept(first if name in first and first[name] in options else second, name, options, rng)

        return self.genome_of(self.decide(pick))

    def enumerate(self) -> Iterator[Genome]:
        """Yield every genome once, in the order of the options."""
        path: list[int] | None = []
        while path is not None:
            decisions = self._along(path)
            yield self.genome_of(decisions)
            path = _next_path(decisions)

    def count(self) -> int:
        """Return the number of genomes. The default enumerates them: large spaces override it with a formula."""
        return sum(1 for _ in self.enumerate())

    def graph(self, genome: Genome) -> Graph:
        """Return the choices as a chain of nodes; spaces that know the layers of their networks override it."""
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
        """Return the decisions at these indices, and the first option of each choice after them."""
        indices = iter(path)
        return self.decide(lambda _name, _options: next(indices, 0))


class ComposedSpace(PlannedSpace, ChoiceSpace):
    """A program of choices that also writes the network. Subclasses only implement `compose`."""

    @abstractmethod
    def compose(self, choose: Choose) -> Plan:
        """Make all choices that define a network, each name once, and return its plan."""

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
    """Return the next indices in lexicographic order (the last choice changes fastest); None after the last of all."""
    indices = [decision.index for decision in decisions]
    for place in reversed(range(len(indices))):
        if indices[place] + 1 < len(decisions[place].options):
            return [*indices[:place], indices[place] + 1]
    return None


def _kept(chosen: Mapping[str, Any], name: str, options: Sequence[Any], rng: np.random.Generator) -> int:
    """Return the index of the genome's own choice if it is available, otherwise a random one."""
    value = chosen.get(name, _NOTHING)
    return options.index(value) if value in options else int(rng.integers(len(options)))


_NOTHING = object()
_NUM_READS = 64

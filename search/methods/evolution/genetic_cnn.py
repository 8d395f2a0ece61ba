"""The genetic algorithm of Genetic CNN (Xie and Yuille, 2017, algorithm 1): strings of bits in stages, selection by
roulette, crossover of whole stages and mutation of bits, in generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import rng_of
from orchestray.search.methods.evolution.generational import Generational, Member
from orchestray.search.methods.evolution.selection import roulette
from orchestray.search.methods.evolution.variation import Candidate
from orchestray.search.methods.space import MAX_DRAWS
from orchestray.search.spaces.architectures.choices import ChoiceSpace

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


@dataclass(frozen=True)
class Genes:
    """The bits of a space: each selects one of the two options of a choice."""

    names: tuple[str, ...]
    options: tuple[tuple[Any, Any], ...]
    architecture: ChoiceSpace | None
    num_of_architecture: int
    """Number of leading bits that choose the architecture; the others are hyper-parameters."""
    stages: tuple[slice, ...]

    def candidate(self, bits: np.ndarray) -> Candidate:
        """Return the candidate of a string of bits, shape [genes]."""
        bit_of = dict(zip(self.names, bits.tolist(), strict=True))
        genome = None
        if self.architecture is not None:
            genome = self.architecture.genome_of(self.architecture.decide(lambda name, _options: bit_of[name]))
        of_space = range(self.num_of_architecture, len(self.names))
        changes = {self.names[place]: self.options[place][bit_of[self.names[place]]] for place in of_space}
        return Candidate(genome, changes)

    def bits(self, candidate: Candidate) -> np.ndarray:
        """Return the bits of a candidate, shape [genes]."""
        chosen = dict(candidate.changes)
        if self.architecture is not None:
            chosen.update(self.architecture.chosen_in(candidate.genome))
        listed = [options.index(chosen[name]) for name, options in zip(self.names, self.options, strict=True)]
        return np.array(listed, dtype=np.int64)


def genes_of(space: Mapping[str, Dimension], architecture: ArchitectureSpace | None) -> Genes:
    """Return the bits of a space.

    Choices of one stage share their name up to the last ".", "/" or "_"; hyper-parameters form a separate stage.

    Raises:
        ConfigError: a choice does not have two options, or the architecture is not a space of choices.
    """
    names: list[str] = []
    options: list[tuple[Any, Any]] = []
    if architecture is not None:
        if not isinstance(architecture, ChoiceSpace):
            raise ConfigError(
                "genetic_cnn works on bits: it wants the space `genetic`, or a ChoiceSpace of binary choices"
            )
        for decision in architecture.decide(lambda _name, _options: 0):
            names.append(decision.name)
            options.append(_two(decision.name, decision.options))
    num_of_architecture = len(names)
    for key, dimension in space.items():
        names.append(key)
        values = (dimension.from_unit(0.25), dimension.from_unit(0.75)) if dimension.num_values == 2 else ()
        options.append(_two(key, values))
    stages, start = [], 0
    for _, group in groupby(enumerate(names), key=lambda it: _stage(it[1]) if it[0] < num_of_architecture else None):
        length = len(list(group))
        stages.append(slice(start, start + length))
        start += length
    return Genes(tuple(names), tuple(options), architecture, num_of_architecture, tuple(stages))


def _two(name: str, options: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(options) != 2:
        raise ConfigError(
            f"genetic_cnn works on bits: {name} must have two options; the space `genetic` is made of such"
        )
    return options[0], options[1]


def _stage(name: str) -> str:
    cut = max(name.rfind(mark) for mark in "./_")
    return name[:cut] if cut > 0 else ""


@dataclass(frozen=True, eq=False)
class BitString(Member):
    """A string of bits in a generation."""

    bits: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class GeneticCnn(Generational[BitString]):
    """A generational genetic algorithm.

    With several objectives, the roulette uses a string's standing in its generation (`fronts.standings_of`).
    """

    most_generations: ClassVar[int] = 200

    def __init__(
        self,
        *,
        mutation_probability: float = 0.8,
        bit_flip_probability: float = 0.05,
        crossover_probability: float = 0.2,
        stage_swap_probability: float = 0.2,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.GeneticCnn` and the arguments of `Evolution`.

        Raises:
            ConfigError: a choice of the architecture, or a key of the space, does not have two values.
        """
        super().__init__(**arguments)
        self.genes = genes_of(self.space, self.architecture)
        self.mutation_probability = mutation_probability
        self.bit_flip_probability = bit_flip_probability
        self.crossover_probability = crossover_probability
        self.stage_swap_probability = stage_swap_probability
        rng = rng_of(self.seed, 0)
        self.members = [self._drawn(rng) for _ in range(self.population_size)]

    def next_generation(self, fitness: Sequence[float]) -> list[BitString]:
        rng = rng_of(self.seed, self.generation)
        chosen = [self.members[index] for index in roulette(fitness, len(fitness), rng)]
        bred: list[BitString] = []
        for first, second in zip(chosen[::2], chosen[1::2], strict=False):
            bred += self._cross(first, second, rng)
        if len(chosen) % 2:
            bred.append(self._mutated(chosen[-1], rng))
        return bred

    def _cross(self, first: BitString, second: BitString, rng: np.random.Generator) -> list[BitString]:
        """Return two strings of the next generation: the pair with stages exchanged, or each mutated."""
        if rng.random() >= self.crossover_probability:
            return [self._mutated(first, rng), self._mutated(second, rng)]
        a, b = first.bits.copy(), second.bits.copy()
        for stage in self.genes.stages:
            if rng.random() < self.stage_swap_probability:
                a[stage], b[stage] = second.bits[stage], first.bits[stage]
        if not all(self.space.is_allowed(self._changes(bits)) for bits in (a, b)):
            return [first, second]
        pair = (self.trial_of[first.key], self.trial_of[second.key])
        return [
            self._member(a, pair[0], f"crossover with trial {pair[1]}"),
            self._member(b, pair[1], f"crossover with trial {pair[0]}"),
        ]

    def _mutated(self, member: BitString, rng: np.random.Generator) -> BitString:
        if rng.random() >= self.mutation_probability:
            return member
        flips = rng.random(len(member.bits)) < self.bit_flip_probability
        bits = np.where(flips, 1 - member.bits, member.bits)
        if not self.space.is_allowed(self._changes(bits)):
            return member
        flipped = ", ".join(name for name, flip in zip(self.genes.names, flips.tolist(), strict=True) if flip)
        return self._member(bits, self.trial_of[member.key], f"flip {flipped}")

    def _drawn(self, rng: np.random.Generator) -> BitString:
        for _ in range(MAX_DRAWS):
            bits = rng.integers(2, size=len(self.genes.names))
            if self.space.is_allowed(self._changes(bits)):
                break
        return self._member(bits, None, "")

    def _changes(self, bits: np.ndarray) -> dict[str, Any]:
        """Return the hyper-parameters of a string."""
        return self.space.active(self.genes.candidate(bits).changes)

    def _member(self, bits: np.ndarray, parent: int | None, change: str) -> BitString:
        candidate = self.genes.candidate(bits)
        candidate = replace(candidate, changes=self._changes(bits))
        return BitString(candidate, self.variation.key(candidate), parent, change, bits)

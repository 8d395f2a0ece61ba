"""NEAT (Stanley and Miikkulainen, 2002): networks that grow node by node, aligned by historical markings, in species
that share their fitness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import merit, rng_of
from orchestray.search.methods.evolution.generational import Generational, Member
from orchestray.search.methods.evolution.variation import Candidate
from orchestray.search.spaces.architectures.topology import Topology, TopologyGenome

_CHAMPION_ABOVE = 5
"""Size above which the best member of a species survives unchanged (section 4.1 of the paper)."""


@dataclass
class Species:
    """Genomes near a representative."""

    representative: TopologyGenome
    members: list[int] = field(default_factory=list)
    """Indices into the generation."""
    best: tuple[float, float] = (-math.inf, -math.inf)
    """Best merit of its members so far, by the first objective."""
    front: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    """Violation and scores of the members so far that no other dominates."""
    last_progress: int = 0
    """Last generation in which a member was on the front that was not before."""

    def takes(self, rows: Sequence[tuple[float, tuple[float, ...]]]) -> bool:
        """Let members join the front; return True if any of them is better than all before in something."""
        has_new = False
        for row in rows:
            if not any(_dominates(one, row) for one in self.front):
                self.front = [*(one for one in self.front if not _dominates(row, one)), row]
                has_new = True
        return has_new


def _dominates(one: tuple[float, tuple[float, ...]], other: tuple[float, tuple[float, ...]]) -> bool:
    """Return True if a row is at least as good as another in everything: it violates less, or no score is worse."""
    if one[0] != other[0]:
        return one[0] < other[0]
    return all(a >= b for a, b in zip(one[1], other[1], strict=True))


class Neat(Generational[Member]):
    """Generations of networks whose genomes contain the weights: they are evaluated, not trained (`steps` 0).

    With several objectives, fitness is the standing in the generation (`fronts.standings_of`). A species makes
    progress when a member is not dominated by those before, since standings of two generations cannot be compared.
    """

    most_generations: ClassVar[int] = 20
    steps_of_member: ClassVar[int | None] = 0

    def __init__(
        self,
        *,
        population: int = 150,
        compatibility: float = 3.0,
        disjoint_weight: float = 1.0,
        weight_weight: float = 0.4,
        survival: float = 0.2,
        stagnation: int = 15,
        crossover_probability: float = 0.75,
        weight_probability: float = 0.8,
        connection_probability: float = 0.3,
        node_probability: float = 0.1,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.Neat` and the arguments of `Evolution`.

        Raises:
            ConfigError: the architecture is not a `Topology`, or the space is not empty.
        """
        super().__init__(population=population, **arguments)
        architecture = self.architecture
        if not isinstance(architecture, Topology):
            raise ConfigError(
                "neat evolves networks of single nodes: it wants search.architecture: {space: topology, inputs: ..., "
                "outputs: ...} (or `painted`, for HyperNEAT)"
            )
        if self.space:
            raise ConfigError(
                "neat evaluates networks without training them, so there is nothing for search.space to do"
            )
        self.topology = architecture
        self.compatibility, self.survival, self.stagnation = compatibility, survival, stagnation
        self.disjoint_weight, self.weight_weight = disjoint_weight, weight_weight
        self.crossover_probability = crossover_probability
        self.weight_probability = weight_probability
        self.connection_probability = connection_probability
        self.node_probability = node_probability
        self.species: list[Species] = []
        self.members = [self._member(architecture.sample(rng_of(self.seed, 0, index))) for index in range(population)]

    def tally(self) -> Mapping[str, Any]:
        return {**super().tally(), "species": len(self.species)}

    def _member(self, genome: TopologyGenome, parent: int | None = None, change: str = "") -> Member:
        candidate = Candidate(genome)
        return Member(candidate, self.variation.key(candidate), parent, change)

    def next_generation(self, fitness: Sequence[float]) -> list[Member]:
        scores = list(fitness)
        rng = rng_of(self.seed, self.generation)
        self._speciate(rng)
        alive = [one for one in self.species if self.generation - one.last_progress <= self.stagnation]
        best = max(self.species, key=lambda one: one.best)
        alive = alive if best in alive else [*alive, best]
        children: list[Member] = []
        for species, num in zip(alive, self._shares(alive, scores), strict=True):
            children += self._brood(species, num, scores, rng)
        self.species = alive
        return children

    def _speciate(self, rng: np.random.Generator) -> None:
        """Put each genome into the first compatible species, or into a new one."""
        for species in self.species:
            species.members = []
        for index, genome in enumerate(member.candidate.genome for member in self.members):
            for species in self.species:
                if self._distance(genome, species.representative) < self.compatibility:
                    species.members.append(index)
                    break
            else:
                self.species.append(Species(genome, [index], last_progress=self.generation))
        self.species = [species for species in self.species if species.members]
        for species in self.species:
            keys = [self.members[index].key for index in species.members]
            reached = [(self.scores[key], self.violations.get(key, 0.0)) for key in keys]
            rows = [(violation, scores) for scores, violation in reached if scores is not None]
            species.best = max([species.best, *(merit(scores[0], violation) for violation, scores in rows)])
            if species.takes(rows):
                species.last_progress = self.generation
            chosen = species.members[int(rng.integers(len(species.members)))]
            species.representative = self.members[chosen].candidate.genome

    def _distance(self, a: TopologyGenome, b: TopologyGenome) -> float:
        return self.topology.distance(a, b, self.disjoint_weight, self.weight_weight)

    def _shares(self, alive: list[Species], scores: list[float]) -> list[int]:
        """Return the number of offspring of each species (explicit fitness sharing).

        It is proportional to the mean score of its members above the worst of all; large fractions are rounded up.
        """
        worst, spread = min(scores), max(scores) - min(scores)
        means = np.array([np.mean([scores[index] for index in species.members]) for species in alive])
        above = means - worst + (1e-3 * spread if spread > 0 else 1.0)
        ideal = above / above.sum() * self.population_size
        shares = np.floor(ideal).astype(int)
        order = np.argsort(-(ideal - shares), kind="stable")
        shares[order[: self.population_size - shares.sum()]] += 1
        return [int(share) for share in shares]

    def _brood(self, species: Species, num: int, scores: list[float], rng: np.random.Generator) -> list[Member]:
        """Return the offspring of a species: the unchanged champion of a large one, and children of its best."""
        ranked = sorted(species.members, key=lambda index: -scores[index])
        parents = ranked[: max(1, math.ceil(self.survival * len(ranked)))]
        has_champion = num > 0 and len(ranked) > _CHAMPION_ABOVE
        champions = [self.members[ranked[0]]] if has_champion else []
        return champions + [self._child(parents, rng) for _ in range(num - len(champions))]

    def _child(self, parents: list[int], rng: np.random.Generator) -> Member:
        first = parents[int(rng.integers(len(parents)))]
        genome, changes = self.members[first].candidate.genome, []
        if len(parents) > 1 and rng.random() < self.crossover_probability:
            second = parents[int(rng.integers(len(parents)))]
            first, other = sorted((first, second), key=parents.index)  # the parents are ranked, the fitter first
            genome, lesser = (self.members[index].candidate.genome for index in (first, other))
            genome = self.topology.crossover(genome, lesser, rng)
            changes.append(f"crossover with trial {self.trial_of[self.members[other].key]}")
        for probability, mutate, name in (
            (self.node_probability, self.topology.with_node, "node"),
            (self.connection_probability, self.topology.with_connection, "connection"),
            (self.weight_probability, self.topology.with_weights, "weights"),
        ):
            if rng.random() < probability:
                genome = mutate(genome, rng)
                changes.append(name)
        return self._member(genome, self.trial_of[self.members[first].key], ", ".join(changes))

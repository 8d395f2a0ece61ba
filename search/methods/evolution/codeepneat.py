"""CoDeepNEAT (Miikkulainen et al., 2017, "Evolving Deep Neural Networks", section 3): blueprints and modules evolve
side by side, each in species, by the scores of the networks assembled from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import rng_of
from orchestray.search.methods.evolution.generational import Generational, Member
from orchestray.search.methods.evolution.marked import MarkedGraphs
from orchestray.search.methods.evolution.parts import Part, Parts
from orchestray.search.methods.evolution.variation import Candidate
from orchestray.search.spaces.architectures.modules import Modules

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Assembly(Member):
    """A network of a generation, with its parts, the blueprint first."""

    parts: tuple[Part, ...] = ()


class CoDeepNeat(Generational[Assembly]):
    """Generations of networks, each assembled from a blueprint and a module of the species that each node names.

    Blueprints and modules begin with one node and grow by mutations. Crossover and species go by the historical marks
    of their nodes and connections (`marked`).
    The hyper-parameters of `space` are part of the blueprint's genome, as in the paper (section 3.2), and evolve with
    it. With several objectives, fitness is the standing in the generation (`fronts.standings_of`).
    """

    most_generations: ClassVar[int] = 50

    def __init__(
        self,
        *,
        population: int = 10,
        modules: int = 15,
        networks: int = 20,
        species: int = 3,
        compatibility: float = 0.5,
        elite: float = 0.4,
        crossover_probability: float = 0.2,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.CoDeepNeat` and the arguments of `Evolution`.

        Raises:
            ConfigError: the architecture is not the space `modules`.
        """
        super().__init__(population=population, **arguments)
        architecture = self.architecture
        if not isinstance(architecture, Modules):
            raise ConfigError(
                "codeepneat assembles blueprints and modules: it wants search.architecture.space: modules"
            )
        self.assembler = architecture
        self.networks, self.elite, self.crossover_probability = networks, elite, crossover_probability
        rng = rng_of(self.seed, 0)
        blueprints, layers = MarkedGraphs(architecture.blueprints, "nodes"), MarkedGraphs(architecture.layers, "layers")
        species = min(species, population)
        self.blueprints = Parts(blueprints, self.space, population, species, compatibility, rng)
        self.modules = Parts(layers, {}, modules, architecture.num_modules, compatibility, rng)
        self.members = self._assemble(rng)

    def _assemble(self, rng: np.random.Generator) -> list[Assembly]:
        """Return a generation of networks: the blueprints in turn, each with a module drawn from every species.

        A number of a species that there is not, or no longer, counts from the first again.
        """
        made = []
        for number in range(self.networks):
            place = number % len(self.blueprints.members)
            blueprint = self.blueprints.members[place]
            living = self.modules.species
            each = [living[index % len(living)] for index in range(self.assembler.num_modules)]
            drawn = [one[int(rng.integers(len(one)))] for one in each]
            modules = [self.modules.graphs.choices_of(module.candidate.genome) for module in drawn]
            genome = self.assembler.assemble(self.blueprints.graphs.choices_of(blueprint.candidate.genome), modules)
            used = [part for part, there in zip(drawn, genome["modules"], strict=True) if there is not None]
            candidate = Candidate(genome, blueprint.candidate.changes)
            change = f"generation {self.generation}, blueprint {place}"
            key = self.variation.key(candidate)
            made.append(Assembly(candidate, key, change=change, parts=(blueprint, *used)))
        return made

    def next_generation(self, fitness: Sequence[float]) -> list[Assembly]:
        self.credit(fitness)
        rng = rng_of(self.seed, self.generation)
        self.blueprints.breed(self.elite, self.crossover_probability, rng)
        self.modules.breed(self.elite, self.crossover_probability, rng)
        return self._assemble(rng)

    def credit(self, fitness: Sequence[float]) -> None:
        """Give every part the fitness of the networks that contain it."""
        for part in (*self.blueprints.members, *self.modules.members):
            part.scores = []
        for assembly, value in zip(self.members, fitness, strict=True):
            for part in assembly.parts:
                part.scores.append(value)

"""CoDeepNEAT (Miikkulainen et al., 2017, "Evolving Deep Neural Networks", section 3): blueprints and modules evolve
side by side, each in species, by what the networks assembled of them achieve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import rng_of
from orchestray.search.methods.evolution.generational import Generational, Member
from orchestray.search.methods.evolution.parts import Part, Parts
from orchestray.search.methods.evolution.variation import Candidate
from orchestray.search.spaces.modules import Modules

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


@dataclass(frozen=True, eq=False)
class Assembly(Member):
    """A network of a generation, and the parts it is made of, the blueprint first."""

    parts: tuple[Part, ...] = ()


class CoDeepNeat(Generational[Assembly]):
    """Generations of networks assembled of a blueprint and, for each of its nodes, a module of the species it names.

    The hyper-parameters of `space` are part of the blueprint's genome, as in the paper (section 3.2), and evolve along.
    By several objectives the fitness of a network is how it stands among those of its generation
    (`selection.standings_of`).
    """

    most_generations: ClassVar[int] = 50

    def __init__(
        self,
        *,
        space: Mapping[str, Dimension],
        architecture: ArchitectureSpace | None = None,
        seed: int = 0,
        trials: int | None = None,
        steps_per_trial: int = 1,
        population: int = 10,
        modules: int = 15,
        networks: int = 20,
        species: int = 3,
        elite: float = 0.4,
        crossover_probability: float = 0.2,
    ) -> None:
        """
        Args:
            space: as of `Method`.
            architecture: the space `modules`; it says how many species of modules there are (`num_modules`).
            seed: as of `Method`.
            trials: as of `Evolution`.
            steps_per_trial: as of `Method`.
            population: blueprints of a generation.
            modules: modules of a generation, of all species.
            networks: assembled and evaluated in a generation.
            species: of the blueprints.
            elite: part of each species that has offspring; its best goes on as it is.
            crossover_probability: that an offspring has two parents.
        """
        super().__init__(
            space=space,
            architecture=architecture,
            seed=seed,
            trials=trials,
            steps_per_trial=steps_per_trial,
            population=population,
        )
        if not isinstance(architecture, Modules):
            raise ConfigError(
                "codeepneat assembles blueprints and modules: it wants search.architecture.space: modules"
            )
        self.assembler = architecture
        self.networks, self.elite, self.crossover_probability = networks, elite, crossover_probability
        rng = rng_of(seed, 0)
        species = min(species, population)
        self.blueprints = Parts(architecture.blueprints, self.space, population, species, rng)
        self.modules = Parts(architecture.layers, {}, modules, architecture.num_modules, rng)
        self.members = self._assemble(rng)

    def _assemble(self, rng: np.random.Generator) -> list[Assembly]:
        """The networks of a generation: the blueprints in turn, each with a module drawn from every species."""
        made = []
        for number in range(self.networks):
            place = number % len(self.blueprints.members)
            blueprint = self.blueprints.members[place]
            drawn = [one[int(rng.integers(len(one)))] for one in self.modules.species]
            genome = self.assembler.assemble(blueprint.candidate.genome, [module.candidate.genome for module in drawn])
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
        """Give every part the fitness of the networks it is in."""
        for part in (*self.blueprints.members, *self.modules.members):
            part.scores = []
        for assembly, value in zip(self.members, fitness, strict=True):
            for part in assembly.parts:
                part.scores.append(value)

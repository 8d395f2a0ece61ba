"""CoDeepNEAT (Miikkulainen et al., 2017, "Evolving Deep Neural Networks", section 3): blueprints and modules evolve
side by side, each in species, by what the networks assembled of them achieve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.methods.evolution.base import Evolution
from orchestray.search.methods.evolution.parts import Part, Parts
from orchestray.search.methods.evolution.variation import Candidate, Individual
from orchestray.search.spaces.modules import Modules

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

_MOST_GENERATIONS = 50


@dataclass(frozen=True)
class Assembly:
    """A network of a generation, and the parts it is made of."""

    candidate: Candidate
    key: str
    parts: tuple[Part, ...]
    blueprint: int
    """Its index in the generation."""


class CoDeepNeat(Evolution):
    """Generations of networks assembled of a blueprint and, for each of its nodes, a module of the species it names.

    The hyper-parameters of `space` are part of the blueprint's genome, as in the paper (section 3.2), and evolve along.
    Order free: a generation depends on all scores of the one before, not on the order in which they came.
    """

    is_order_free: ClassVar[bool] = True

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
        self.generation = 0
        self.trial_of: dict[str, int] = {}
        self.scores: dict[str, float | None] = {}
        """By key; None for what has failed."""
        self.assemblies = self._assemble(rng)

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        for _ in range(_MOST_GENERATIONS):
            for assembly in self.assemblies:
                if assembly.key not in self.trial_of:
                    self.trial_of[assembly.key] = self.num_proposed
                    said = f"generation {self.generation}, blueprint {assembly.blueprint}"
                    return self.propose(assembly.candidate, change=said)
            if self.running:
                return None
            self._next_generation()
        self.is_exhausted = True
        return None

    def enter(self, individual: Individual) -> None:
        self.scores[self.variation.key(individual.candidate)] = individual.score

    def failed(self, trial: int, candidate: Candidate) -> None:
        self.scores[self.variation.key(candidate)] = None

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
            made.append(Assembly(candidate, self.variation.key(candidate), (blueprint, *used), place))
        return made

    def _next_generation(self) -> None:
        self.credit()
        self.generation += 1
        rng = rng_of(self.seed, self.generation)
        self.blueprints.breed(self.elite, self.crossover_probability, rng)
        self.modules.breed(self.elite, self.crossover_probability, rng)
        self.assemblies = self._assemble(rng)

    def credit(self) -> None:
        """Give every part the scores of the networks it is in; a network that failed counts as the worst."""
        known = [score for assembly in self.assemblies if (score := self.scores[assembly.key]) is not None]
        worst = min(known, default=0.0)
        for part in (*self.blueprints.members, *self.modules.members):
            part.scores = []
        for assembly in self.assemblies:
            score = self.scores[assembly.key]
            for part in assembly.parts:
                part.scores.append(worst if score is None else score)

"""A population of parts of networks, in species; a part's fitness is the score of the networks that contain it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.search.methods.evolution.variation import Candidate, Variation

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.choices import ChoiceSpace
    from orchestray.search.spaces.dimensions import Dimension


@dataclass
class Part:
    """A blueprint or a module, with the scores of the networks that contained it."""

    candidate: Candidate
    scores: list[float] = field(default_factory=list)

    @property
    def credit(self) -> float | None:
        """Mean score of the networks that contained the part; None if none did."""
        return float(np.mean(self.scores)) if self.scores else None


class Parts:
    """Parts of one kind, in a fixed number of species.

    Args:
        architecture: space of the parts.
        space: hyper-parameters that each part has too.
        size: number of parts of a generation.
        num_species: number of species, each with at least one part.
        rng: random numbers for the first generation.
    """

    def __init__(
        self,
        architecture: ChoiceSpace,
        space: Mapping[str, Dimension],
        size: int,
        num_species: int,
        rng: np.random.Generator,
    ) -> None:
        self.variation = Variation(space, architecture)
        self.architecture = architecture
        self.size, self.num_species = max(size, num_species), num_species
        self.members = [Part(self.variation.sample(rng)) for _ in range(self.size)]
        self.species = self._divide([part.candidate for part in self.members[:num_species]])

    def distance(self, a: Candidate, b: Candidate) -> float:
        """Return the fraction of differing choices, of all choices that either has made."""
        chosen_a, chosen_b = (dict(self.architecture.chosen_in(one.genome)) for one in (a, b))
        names = chosen_a.keys() | chosen_b.keys()
        differing = sum(chosen_a.get(name) != chosen_b.get(name) for name in names)
        return float(differing / max(len(names), 1))

    def _divide(self, representatives: Sequence[Candidate]) -> list[list[Part]]:
        """Return the species: each part joins the nearest representative; a representative its own species."""
        species: list[list[Part]] = [[] for _ in representatives]
        places = {id(one): index for index, one in enumerate(representatives)}
        for part in self.members:
            place = places.get(id(part.candidate))
            if place is None:
                distances = [self.distance(part.candidate, one) for one in representatives]
                place = int(np.argmin(distances))
            species[place].append(part)
        return species

    def breed(self, elite: float, crossover_probability: float, rng: np.random.Generator) -> None:
        """Replace the generation by its offspring.

        The number of offspring of a species is proportional to the mean credit of its members above the least of all.
        Its best member survives unchanged as the representative; the others are children of its best members.

        Args:
            elite: part of a species, the best, that has children.
            crossover_probability: probability that a child has two parents.
            rng: random numbers for this generation.
        """
        earned = [part.credit for part in self.members if part.credit is not None]
        usual, least = (float(np.mean(earned)), min(earned)) if earned else (0.0, 0.0)

        def credit(part: Part) -> float:
            return usual if part.credit is None else part.credit

        means = np.array([np.mean([credit(part) for part in one]) for one in self.species])
        shares = _shares(means - least, self.size)
        members: list[Part] = []
        representatives: list[Candidate] = []
        for one, share in zip(self.species, shares, strict=True):
            ranked = sorted(one, key=credit, reverse=True)
            parents = ranked[: max(1, ceil(elite * len(ranked)))]
            champion = Part(Candidate(ranked[0].candidate.genome, ranked[0].candidate.changes))
            representatives.append(champion.candidate)
            members.append(champion)
            members += [self._child(parents, crossover_probability, rng) for _ in range(share - 1)]
        self.members = members
        self.species = self._divide(representatives)

    def _child(self, parents: Sequence[Part], crossover_probability: float, rng: np.random.Generator) -> Part:
        first = parents[int(rng.integers(len(parents)))].candidate
        if len(parents) > 1 and rng.random() < crossover_probability:
            second = parents[int(rng.integers(len(parents)))].candidate
            first = self.variation.crossover(first, second, rng)
        return Part(self.variation.mutate(first, rng)[0])


def _shares(above: np.ndarray[Any, Any], total: int) -> list[int]:
    """Return integers of at least 1 that add up to `total`, in proportion to the given numbers."""
    spread = above.max()
    weights = above + (0.1 * spread if spread > 0 else 1.0)
    ideal = weights / weights.sum() * (total - len(above))
    shares = np.floor(ideal).astype(int)
    order = np.argsort(-(ideal - shares), kind="stable")
    shares[order[: total - len(above) - int(shares.sum())]] += 1
    return [1 + int(share) for share in shares]

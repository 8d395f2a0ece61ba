"""A population of parts of networks, in species by historical marks.

The fitness of a part is the mean score of the networks that contain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.search.methods.evolution.variation import Candidate, Variation

if TYPE_CHECKING:
    from orchestray.search.methods.evolution.marked import MarkedGraphs
    from orchestray.search.spaces.dimensions import Dimension

_RISE = 1.1
"""Factor of the threshold after a generation with as many species as there may be."""


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
    """Parts of one kind, in species of compatible graphs.

    As in NEAT, a part joins the first species whose representative is nearer than a threshold, or founds a new one. The
    number of species is limited, since blueprints name the species of modules: at the limit a part joins the nearest,
    and the threshold rises until species merge. Below the limit it falls.

    Args:
        graphs: the parts' graphs.
        space: hyper-parameters that each part has too.
        size: number of parts of a generation.
        most_species: largest number of species.
        compatibility: threshold at the beginning.
        rng: random numbers for the first generation.
    """

    def __init__(
        self,
        graphs: MarkedGraphs,
        space: Mapping[str, Dimension],
        size: int,
        most_species: int,
        compatibility: float,
        rng: np.random.Generator,
    ) -> None:
        self.variation = Variation(space, graphs)
        self.graphs, self.compatibility = graphs, compatibility
        self.size, self.most_species = max(size, most_species), most_species
        self.members = [Part(self.variation.sample(rng)) for _ in range(self.size)]
        self.species = self._divide([])

    def _divide(self, representatives: Sequence[Candidate]) -> list[list[Part]]:
        """Return the species of the members, the first of each its representative."""
        places = {id(one): index for index, one in enumerate(representatives)}
        firsts: list[Candidate] = []
        species: list[list[Part]] = []
        # The representatives come first, so that a species whose representative joins another is gone.
        for part in sorted(self.members, key=lambda part: places.get(id(part.candidate), len(places))):
            distances = [self.graphs.distance(part.candidate.genome, one.genome) for one in firsts]
            near = [place for place, distance in enumerate(distances) if distance < self.compatibility]
            if near or len(species) == self.most_species:
                species[near[0] if near else int(np.argmin(distances))].append(part)
            else:
                firsts.append(part.candidate)
                species.append([part])
        self.compatibility *= _RISE if len(species) == self.most_species else 1 / _RISE
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
        """Return a mutant of a parent, or of two crossed; parents are ranked, the fittest first."""
        place = int(rng.integers(len(parents)))
        made = parents[place].candidate
        if len(parents) > 1 and rng.random() < crossover_probability:
            fitter, other = sorted((place, int(rng.integers(len(parents)))))
            made = self.variation.crossover(parents[fitter].candidate, parents[other].candidate, rng)
        return Part(self.variation.mutate(made, rng)[0])


def _shares(above: np.ndarray[Any, Any], total: int) -> list[int]:
    """Return integers of at least 1 that add up to `total`, in proportion to the given numbers."""
    spread = above.max()
    weights = above + (0.1 * spread if spread > 0 else 1.0)
    ideal = weights / weights.sum() * (total - len(above))
    shares = np.floor(ideal).astype(int)
    order = np.argsort(-(ideal - shares), kind="stable")
    shares[order[: total - len(above) - int(shares.sum())]] += 1
    return [1 + int(share) for share in shares]

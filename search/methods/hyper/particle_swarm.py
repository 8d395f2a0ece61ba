"""Particle swarm optimisation: Kennedy and Eberhart, 1995, with the constriction of Clerc and Kennedy, 2002."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal, merit, rng_of
from orchestray.search.methods.hyper.proposer import MAX_DRAWS, Proposer
from orchestray.search.methods.hyper.random import SobolPoints

_VELOCITY_DRAW, _PLACE_DRAW = 0x950, 0x951


@dataclass
class Particle:
    """A moving point of the unit cube."""

    position: np.ndarray
    velocity: np.ndarray
    best: np.ndarray = field(init=False)
    """Position of the best score."""
    best_merit: tuple[float, float] = (-math.inf, -math.inf)

    def __post_init__(self) -> None:
        self.best = self.position


class ParticleSwarm(Proposer):
    """Particles that fly through the unit cube, each attracted by its own best point and by the best point of all.

        v <- inertia v + personal r1 (own best - x) + common r2 (best of all - x)
        x <- x + v

    r1 and r2 are random for each coordinate and move. A particle that would leave the cube stops at its wall.

    Asynchronous: a particle moves as soon as its trial has ended, by the best point known then. With `synchronous` all
    move together when all have ended; only then are the proposals the same at any concurrency. Integers, choices and
    flags are treated like numbers. `search.simulation` runs it as a plain optimiser of a function.
    """

    def __init__(
        self,
        *,
        population: int = 16,
        inertia: float = 0.7298,
        personal: float = 1.49618,
        common: float = 1.49618,
        synchronous: bool = False,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.ParticleSwarm` and the arguments of `Method`.

        Raises:
            ConfigError: an architecture is searched, or a parameter is out of its range.
        """
        super().__init__(**arguments)
        if self.architecture is not None:
            raise ConfigError(
                "particle_swarm flies through numbers and has no way through architectures; use bayesian, random or "
                "regularized_evolution"
            )
        if population < 2:
            raise ConfigError(f"search.method.population: a swarm needs at least 2 particles, got {population}")
        if not (0 <= inertia < 1 and personal >= 0 and common >= 0):
            raise ConfigError("search.method: inertia must be from 0 to below 1, personal and common at least 0")
        self.inertia, self.personal, self.common, self.synchronous = inertia, personal, common, synchronous
        self.is_order_free = synchronous  # type: ignore[misc]  # only where all wait for all
        starts = SobolPoints(len(self.space), self.seed)
        speeds = rng_of(self.seed, _VELOCITY_DRAW).uniform(-0.25, 0.25, (population, len(self.space)))
        self.particles = [Particle(starts[number], speeds[number]) for number in range(population)]
        self.best = self.particles[0].position
        """Position of the best score of all; a synchronous swarm updates it when it moves."""
        self.best_merit = (-math.inf, -math.inf)
        self._ready = deque(range(population))
        """Particles whose position has not been proposed yet."""
        self._arrived: dict[int, tuple[float, float] | None] = {}
        """Merits of the particles that have ended and not moved yet; None: the trial failed."""
        self._flying: dict[int, int] = {}
        """Maps a running trial to its particle."""
        self.num_moves = 0
        """Number of times that a particle has flown on."""

    def tally(self) -> Mapping[str, Any]:
        return {"moves": self.num_moves, "best": self.space.from_units(self.best)}

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        """Begin the first particles at these values.

        Raises:
            ConfigError: there are more of them than particles.
        """
        if len(start) > len(self.particles):
            raise ConfigError(
                f"search.start: has {len(start)} trials, and the swarm {len(self.particles)} particles; raise "
                "search.method.population"
            )
        return super().begin_with(start)

    def ask(self) -> Proposal | None:
        if self.is_done or not self._ready:
            return None
        particle = self._ready.popleft()
        values = self._values(particle)
        if self.is_beginning:
            values = self.begun(values or self.space.from_units(self.particles[particle].position))
            self._place(self.particles[particle], values)
            self.particles[particle].best = self.particles[particle].position
        if values is None:
            self.is_exhausted = True
            return None
        proposal = self.propose(values, change=f"particle {particle}")
        self._flying[proposal.trial] = particle
        return proposal

    def _values(self, number: int) -> dict[str, Any] | None:
        """Return the values at a particle; one at a known point, or one that no trial can have, is moved at random.

        None: all points are known.
        """
        particle = self.particles[number]
        values = self.space.from_units(particle.position)
        draws = rng_of(self.seed, _PLACE_DRAW, number, self.num_asked)
        for _ in range(MAX_DRAWS):
            if self.is_new(values):
                return values
            particle.position = draws.random(len(self.space))
            particle.velocity = np.zeros(len(self.space))
            values = self.space.from_units(particle.position)
        last = self.last_point()
        if last is not None:
            self._place(particle, last)
        return last if self.space.is_finite else values

    def _place(self, particle: Particle, values: Mapping[str, Any]) -> None:
        """Move a particle to a point; along keys that the point does not have it stays."""
        axes = enumerate(self.space.items())
        at = [d.to_unit(values[key]) if key in values else particle.position[axis] for axis, (key, d) in axes]
        particle.position = np.array(at)

    def tell(self, finished: Finished) -> None:
        particle = self._flying.pop(finished.trial)
        is_failed = finished.status == "failed" or finished.score is None
        self._arrived[particle] = None if is_failed else merit(finished.score or 0.0, finished.violation)
        if not self.synchronous or len(self._arrived) == len(self.particles):
            arrived, self._arrived = sorted(self._arrived.items()), {}
            # In the order of numbers, not of arrival: among equal best scores the first particle counts.
            for number, reached in arrived:
                self._score(self.particles[number], reached or (-math.inf, -math.inf))
            for number, _ in arrived:
                self._move(number, finished.trial)

    def _score(self, particle: Particle, reached: tuple[float, float]) -> None:
        if reached > particle.best_merit:
            particle.best, particle.best_merit = particle.position, reached
        if reached > self.best_merit:
            self.best, self.best_merit = particle.position, reached

    def _move(self, number: int, trial: int) -> None:
        particle = self.particles[number]
        when = self.num_asked if self.synchronous else trial
        own, all_ = rng_of(self.seed, number, when).random((2, len(self.space)))
        velocity = (
            self.inertia * particle.velocity
            + self.personal * own * (particle.best - particle.position)
            + self.common * all_ * (self.best - particle.position)
        )
        position = np.clip(particle.position + velocity, 0.0, 1.0)
        particle.velocity = np.where(position == particle.position + velocity, velocity, 0.0)
        particle.position = position
        self.num_moves += 1
        self._ready.append(number)

"""Methods for hyper-parameters, as a search config names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import AtLeastZero, BelowOne, Flag, Positive, Section, Whole

AtLeast2 = Annotated[Whole, Field(ge=2)]
AtLeast4 = Annotated[Whole, Field(ge=4)]


class Grid(Section):
    """Every combination of the given values, once."""

    type: Literal["grid"]
    """The method `grid`."""

    points: dict[str, Positive] = Field(default_factory=dict)
    """How many values of a key are tried, evenly over its range, both ends included: needed for each key of type
    `uniform` or `log_uniform`, possible for integers."""


class Random(Section):
    """Draws, independent of each other."""

    type: Literal["random"]
    """The method `random`."""

    sequence: Literal["pseudo", "sobol"] = "pseudo"
    """Random numbers, or a scrambled Sobol sequence, which fills the space more evenly."""


class Bayesian(Section):
    """A model of the score says what to try next."""

    type: Literal["bayesian"]
    """The method `bayesian`."""

    model: Literal["gaussian_process", "tpe"] = "gaussian_process"
    """A Gaussian process with expected improvement, or the tree-structured Parzen estimator."""
    initial: AtLeast2 | None = None
    """Trials, spread evenly, before the model is used; null: the number of dimensions, twice, and 2; 10 for `tpe`."""
    pending: Literal["believer", "liar"] = "believer"
    """How trials that still run count for the Gaussian process: with the score it predicts, or with the worst."""


class ParticleSwarm(Section):
    """Particles drawn to their own best and to the best of all (Kennedy and Eberhart, 1995)."""

    type: Literal["particle_swarm"]
    """The method `particle_swarm`."""

    population: AtLeast2 = 16
    """Number of particles, and the most trials that can run at once."""
    inertia: BelowOne = 0.7298
    """What remains of a particle's velocity."""
    personal: AtLeastZero = 1.49618
    """Pull of a particle's own best point."""
    common: AtLeastZero = 1.49618
    """Pull of the best point of all."""
    synchronous: Flag = False
    """All particles move together, when the last of them has been evaluated."""


class Spectral(Section):
    """A sparse polynomial over on/off choices, found by compressed sensing (Hazan et al., 2018)."""

    type: Literal["spectral"]
    """The method `spectral`."""

    stages: Positive = 3
    """How often the choices that matter most are fixed."""
    samples: AtLeast4 = 100
    """Trials of a stage."""
    degree: Positive = 3
    """How many choices may act together."""
    terms: Positive = 5
    """Interactions a stage looks for at most."""
    keep: Positive = 4
    """Best assignments of a stage that the next one draws from."""


HyperMethod = Grid | Random | Bayesian | ParticleSwarm | Spectral

"""Methods for hyper-parameters, as a search config names them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestray.platform.config.base import Positive, Section


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


class Asha(Section):
    """Asynchronous successive halving (Li et al., 2020)."""

    type: Literal["asha"]
    """The method `asha`."""


class MedianStopping(Section):
    """Stop what is worse than the median of the others at the same step (Golovin et al., 2017)."""

    type: Literal["median_stopping"]
    """The method `median_stopping`."""


class LearningCurve(Section):
    """Predict how a trial ends from how it began, and stop what cannot win (Domhan et al., 2015)."""

    type: Literal["learning_curve"]
    """The method `learning_curve`."""


class ParticleSwarm(Section):
    """Particles drawn to their own best and to the best of all (Kennedy and Eberhart, 1995)."""

    type: Literal["particle_swarm"]
    """The method `particle_swarm`."""


class Spectral(Section):
    """A sparse polynomial over on/off choices, found by compressed sensing (Hazan et al., 2018)."""

    type: Literal["spectral"]
    """The method `spectral`."""


HyperMethod = Grid | Random | Bayesian | Asha | MedianStopping | LearningCurve | ParticleSwarm | Spectral

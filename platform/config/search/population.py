"""Population-based training, as a search config names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, Flag, Fraction, Positive, Section, ZeroToOne


class PopulationBasedTraining(Section):
    """A population that trains, copies its winners and perturbs their hyper-parameters (Jaderberg et al., 2017)."""

    type: Literal["population_based_training"]
    """The method `population_based_training`."""
    population: Annotated[Positive, Field(ge=2)] = 8
    """Members; each is a trial."""
    interval_steps: Positive = 50
    """Steps between two looks at the others."""
    exploit: Literal["truncation", "binary_tournament", "t_test"] = "truncation"
    """Who copies whom: the worst part of all one of the best part; or each one drawn by chance that is better; or that
    only if Welch's t-test finds its validations better."""
    fraction: Annotated[Fraction, Field(le=0.5)] = 0.2
    """Part of the population that copies, and that is copied, in `truncation`."""
    p: Fraction = 0.05
    """Below which a difference is none of chance, in `t_test`."""
    evaluations: Annotated[Positive, Field(ge=2)] = 10
    """Validations of each member that `t_test` looks at: the last so many."""
    explore: Literal["perturb", "resample", "both"] = "perturb"
    """How a copy's hyper-parameters are changed: each times one of `factors`; each drawn anew by chance; or either."""
    factors: Annotated[tuple[AboveZero, ...], Field(min_length=1)] = (0.8, 1.2)
    """Of a perturbation: one of them is drawn."""
    resample_probability: ZeroToOne = 0.25
    """With which a value is drawn anew, in `resample` and `both`."""
    initial: tuple[dict[str, Any], ...] = ()
    """Values of the first members, by key; what is left out is drawn."""
    synchronous: Flag = False
    """Whether all wait for each other after every interval; then the outcome is the same at any concurrency."""
    packed: Flag = False
    """Train all members as one batched program in one process."""


class Omnivore(Section):
    """A grid of momentum, rate and staleness, tried again and again while one model trains (Hadjis et al., 2016)."""

    type: Literal["omnivore"]
    """The method `omnivore`."""
    every_steps: Annotated[Positive, Field(ge=2)] = 100
    """Steps from one retune to the next."""
    probe_steps: Positive = 10
    """Steps that each point of the grid is tried."""


PopulationMethod = PopulationBasedTraining | Omnivore

"""The parameters of the methods for hyper-parameters, and of those that stop trials early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from orchestray.platform.config.base import AtLeastZero, BelowOne, Flag, Fraction, Positive, Whole
from orchestray.platform.config.problems import Problem, nearest
from orchestray.search.methods.params import MethodSection, Searched

if TYPE_CHECKING:
    ProposingMethod = MethodSection  # `search.config.methods` supplies the union of all methods that may be inside

AtLeast2 = Annotated[Whole, Field(ge=2)]
AtLeast4 = Annotated[Whole, Field(ge=4)]


class Grid(MethodSection):
    """Every combination of the given values, once."""

    counts_itself = True

    type: Literal["grid"]
    """The method `grid`."""

    points: dict[str, Positive] = Field(default_factory=dict)
    """Number of values of a key to try, evenly over its range, both ends included: needed for each key of type
    `uniform` or `log_uniform`, possible for integers."""

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        for key, dimension in searched.dimensions.items():
            if dimension.type in ("uniform", "log_uniform") and key not in self.points:
                text = f"a grid needs to know how many of its values to try: say {place}.points: {{{key}: N}}"
                yield Problem(f"search.space.{key}", f"{text}, or make it a choice")
        for key in self.points:
            if searched.keys and key not in searched.keys:
                yield Problem(f"{place}.points.{key}", f"is no key of search.space{nearest(key, searched.keys)}")


class Random(MethodSection):
    """Draws, independent of each other."""

    type: Literal["random"]
    """The method `random`."""

    sequence: Literal["pseudo", "sobol"] = "pseudo"
    """Random numbers, or a scrambled Sobol sequence, which fills the space more evenly."""


class Bayesian(MethodSection):
    """A model of the score says what to try next."""

    counts = ("initial",)

    type: Literal["bayesian"]
    """The method `bayesian`."""

    model: Literal["gaussian_process", "tpe"] = "gaussian_process"
    """A Gaussian process with expected improvement, or the tree-structured Parzen estimator."""
    initial: AtLeast2 | None = None
    """Trials, spread evenly, before the model is used; null: twice the number of dimensions, plus 2; 10 for `tpe`."""
    pending: Literal["believer", "liar"] = "believer"
    """Score that the Gaussian process assumes for trials that still run: its own prediction, or the worst score."""


class ParticleSwarm(MethodSection):
    """Particles drawn to their own best and to the best of all (Kennedy and Eberhart, 1995)."""

    searches = "space"
    counts = ("population",)

    type: Literal["particle_swarm"]
    """The method `particle_swarm`."""

    population: AtLeast2 = 16
    """Number of particles, and the most trials that can run at once."""
    inertia: BelowOne = 0.7298
    """Part of a particle's velocity that remains."""
    personal: AtLeastZero = 1.49618
    """Pull of a particle's own best point."""
    common: AtLeastZero = 1.49618
    """Pull of the best point of all."""
    synchronous: Flag = False
    """All particles move together, when the last of them has been evaluated."""


class Spectral(MethodSection):
    """A sparse polynomial over on/off choices, found by compressed sensing (Hazan et al., 2018)."""

    searches = "space"
    counts = ("samples",)

    type: Literal["spectral"]
    """The method `spectral`."""

    stages: Positive = 3
    """Number of times that the choices that matter most are fixed."""
    samples: AtLeast4 = 100
    """Trials of a stage."""
    degree: Positive = 3
    """Number of choices that may act together."""
    terms: Positive = 5
    """Most interactions that a stage looks for."""
    keep: Positive = 4
    """Best assignments of a stage that the next one draws from."""


class Proposals(MethodSection):
    """A method that stops trials early around another one that proposes them."""

    why_not_within: ClassVar[str | None] = (
        "ends trials early itself, and two would end each other's; name here what proposes the trials"
    )

    proposals: ProposingMethod = Random(type="random")
    """The method that proposes the trials, with its parameters, as it would stand under `search.method`."""

    @property
    def proposer(self) -> MethodSection:
        return self.proposals

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        yield from super().problems(place, searched)
        yield from self.proposals.problems(f"{place}.proposals", searched)


class Asha(Proposals):
    """Asynchronous successive halving (Li et al., 2020)."""

    type: Literal["asha"]
    """The method `asha`."""

    eta: AtLeast2 = 4
    """One trial in `eta` goes on from a rung to the next, and is trained `eta` times as long."""
    grace_steps: Positive | None = None
    """Steps of the first rung; null: the steps of a trial divided by eta three times, or as often as
    there are trials enough for one to come through."""
    brackets: Positive = 1
    """Number of different first rungs at which trials begin; more than 1: asynchronous Hyperband."""


class MedianStopping(Proposals):
    """Stop what is worse than the median of the others at the same step (Golovin et al., 2017)."""

    type: Literal["median_stopping"]
    """The method `median_stopping`."""

    grace_steps: Positive | None = None
    """No trial is stopped before this step; null: a tenth of the steps of a trial."""
    every_steps: Positive | None = None
    """Steps between two judgements of a trial; null: a twentieth of the steps of a trial."""
    min_trials: Positive = 5
    """No trial is stopped at a step that fewer others have reached."""

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        yield from super().problems(place, searched)
        trials = searched.trials
        if trials is not None and self.min_trials >= trials and not self.is_default("min_trials"):
            text = f"must be less than the budget's trials ({trials}), or none is ever stopped; got {self.min_trials}"
            yield Problem(f"{place}.min_trials", text)


class LearningCurve(Proposals):
    """Predict how a trial ends from how it began, and stop what cannot win (Domhan et al., 2015)."""

    type: Literal["learning_curve"]
    """The method `learning_curve`."""

    probability: Fraction = 0.05
    """A trial is stopped when it beats the best with less than this probability."""
    grace_steps: Positive | None = None
    """No trial is stopped before this step; null: a fifth of the steps of a trial."""
    every_steps: Positive | None = None
    """Steps between two reports of a trial; null: a twentieth of the steps of a trial."""

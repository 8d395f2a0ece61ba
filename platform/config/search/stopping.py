"""Methods that stop trials early around another one, as a search config names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from orchestray.platform.config.base import Fraction, Positive, Section
from orchestray.platform.config.search.controllers import Progressive, QLearning, Reinforce
from orchestray.platform.config.search.evolution import EvolutionMethod
from orchestray.platform.config.search.hyper import AtLeast2, HyperMethod, Random

_ENDS_TRIALS = "ends trials early itself, and two would end each other's; name here what proposes the trials"
_STEERS_TRIALS = (
    "steers its members while they train, by comparing all of them: none may be taken away; use it by itself"
)
_ONE_TRAINING = "trains one network for all candidates, in a trial that must not be ended early; use it by itself"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("asha", "median_stopping", "learning_curve"), _ENDS_TRIALS),
    **dict.fromkeys(("population_based_training", "omnivore"), _STEERS_TRIALS),
    **dict.fromkeys(("enas", "darts", "smash"), _ONE_TRAINING),
}


def why_not_within(name: object) -> str | None:
    """Why the trials of a method are not to be stopped by another one; None: they may be."""
    reason = _REASONS.get(name) if isinstance(name, str) else None
    return None if reason is None else f"{name} {reason}"


def _refuse(value: object) -> object:
    reason = why_not_within(value.get("type")) if isinstance(value, Mapping) else None
    if reason is not None:
        raise ValueError(reason)
    return value


ProposingMethod = Annotated[
    HyperMethod | EvolutionMethod | Reinforce | QLearning | Progressive, Field(discriminator="type")
]
"""A method whose trials do not depend on each other while they train."""


class Proposals(Section):
    """A method that stops trials early around another one that proposes them."""

    proposals: Annotated[ProposingMethod, BeforeValidator(_refuse)] = Random(type="random")
    """The method that proposes the trials, with its parameters, as it would stand under `search.method`."""


class Asha(Proposals):
    """Asynchronous successive halving (Li et al., 2020)."""

    type: Literal["asha"]
    """The method `asha`."""

    eta: AtLeast2 = 4
    """One trial in so many goes on from a rung to the next, and is trained so many times as long."""
    grace_steps: Positive | None = None
    """Steps of the first rung; null: the steps of a trial divided by eta three times, or as often as
    there are trials enough for one to come through."""
    brackets: Positive = 1
    """With how many different first rungs trials begin; more than 1: asynchronous Hyperband."""


class MedianStopping(Proposals):
    """Stop what is worse than the median of the others at the same step (Golovin et al., 2017)."""

    type: Literal["median_stopping"]
    """The method `median_stopping`."""

    grace_steps: Positive | None = None
    """No trial is stopped before this step; null: a tenth of the steps of a trial."""
    every_steps: Positive | None = None
    """How often a trial is judged; null: a twentieth of the steps of a trial."""
    min_trials: Positive = 5
    """No trial is stopped at a step that fewer others have come to."""


class LearningCurve(Proposals):
    """Predict how a trial ends from how it began, and stop what cannot win (Domhan et al., 2015)."""

    type: Literal["learning_curve"]
    """The method `learning_curve`."""

    probability: Fraction = 0.05
    """A trial is stopped when it beats the best with less than this probability."""
    grace_steps: Positive | None = None
    """No trial is stopped before this step; null: a fifth of the steps of a trial."""
    every_steps: Positive | None = None
    """How often a trial reports; null: a twentieth of the steps of a trial."""


StoppingMethod = Asha | MedianStopping | LearningCurve

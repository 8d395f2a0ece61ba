"""The parameters of population-based training and of Omnivore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, Flag, Fraction, Positive, ZeroToOne
from orchestray.platform.config.problems import Problem, nearest
from orchestray.search.methods.params import MethodSection, Searched

_STEERS_TRIALS = (
    "steers its members while they train, by comparing all of them: none may be taken away; use it by itself"
)


class PopulationBasedTraining(MethodSection):
    """A population that trains, copies its winners and perturbs their hyper-parameters (Jaderberg et al., 2017)."""

    searches = "space"
    counts = ("population",)
    changes_running = True
    why_not_within = _STEERS_TRIALS

    type: Literal["population_based_training"]
    """The method `population_based_training`."""
    population: Annotated[Positive, Field(ge=2)] = 8
    """Members; each is a trial."""
    interval_steps: Positive = 50
    """Steps between two looks at the others."""
    exploit: Literal["truncation", "binary_tournament", "t_test"] = "truncation"
    """Rule by which members copy others: the worst part copies the best part; or each copies a member drawn by chance
    if that is better; or only if Welch's t-test finds its validations better."""
    fraction: Annotated[Fraction, Field(le=0.5)] = 0.2
    """Part of the population that copies, and that is copied, in `truncation`."""
    p: Fraction = 0.05
    """Significance level of `t_test`."""
    evaluations: Annotated[Positive, Field(ge=2)] = 10
    """Last validations of each member that `t_test` compares."""
    explore: Literal["perturb", "resample", "both"] = "perturb"
    """Change of a copy's hyper-parameters: each times one of `factors`; each drawn again by chance; or either."""
    factors: Annotated[tuple[AboveZero, ...], Field(min_length=1)] = (0.8, 1.2)
    """Factors of a perturbation: one of them is drawn."""
    resample_probability: ZeroToOne = 0.25
    """Probability that a value is drawn again, in `resample` and `both`."""
    initial: tuple[dict[str, Any], ...] = ()
    """Values of the first members, by key; missing values are drawn."""
    synchronous: Flag = False
    """True if all members wait for each other after every interval: the outcome is the same at any concurrency."""
    packed: Flag = False
    """Train all members as one batched program in one process."""

    @property
    def is_one_process(self) -> bool:
        return self.packed

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        yield from super().problems(place, searched)
        if not searched.keys:
            return
        for number, values in enumerate(self.initial):
            for key, value in values.items():
                path = f"{place}.initial.{number}.{key}"
                dimension = searched.dimensions.get(key)
                if key not in searched.keys:
                    yield Problem(path, f"is no key of search.space{nearest(key, searched.keys)}")
                elif dimension is not None and (text := searched.why_outside(dimension, value)) is not None:
                    yield Problem(path, f"{text}, which is what search.space says of {key}")


class Omnivore(MethodSection):
    """A grid of momentum, rate and staleness, tried again and again while one model trains (Hadjis et al., 2016)."""

    searches = "space"
    counts_itself = True
    changes_running = True
    why_not_within = _STEERS_TRIALS

    type: Literal["omnivore"]
    """The method `omnivore`."""
    every_steps: Annotated[Positive, Field(ge=2)] = 100
    """Steps between two retunes."""
    probe_steps: Positive = 10
    """Steps for which each point of the grid is trained."""

"""The sections of a search config."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from orchestray.platform.config.base import AboveZero, Number, Positive, Section, Seed, Text
from orchestray.platform.config.metric_names import Mode, mode_of_metric
from orchestray.search.config.combinations import Combinations, combinations_of
from orchestray.search.config.conditions import space_conditions
from orchestray.search.config.dimensions import Dimension
from orchestray.search.config.methods import AnyMethod
from orchestray.search.config.start import first_trial
from orchestray.search.methods.conditions import Conditions
from orchestray.search.spaces.architectures.measures import MEASURES
from orchestray.trainers.config.schema import RunName, TrainConfig


class Bounds(Section):
    """The values that a metric may have in a feasible trial."""

    max: Number | None = None
    """The most that it may be."""
    min: Number | None = None
    """The least that it may be."""


class Objective(Section):
    """An objective by which trials are compared."""

    metric: Text
    """Name of a validation metric, or `loss`; or of the built network `parameters`, `flops` or `latency_ms`."""
    mode: Mode | None = None
    """Direction that is better; null: by the metric's name, or by the task's `lower_is_better`; required where neither
    says it. Measures of the network are better when lower."""
    subject_to: dict[Text, Bounds] = Field(default_factory=dict)
    """Bounds of metrics, or of the network's measures: the best trial is the best of those that keep them all."""

    @field_validator("mode", mode="after")
    @classmethod
    def _resolve_mode(cls, mode: Mode | None, info: ValidationInfo) -> Mode | None:
        metric = str(info.data.get("metric", ""))
        return mode or ("min" if metric in MEASURES else mode_of_metric(metric))

    @property
    def sign(self) -> float:
        """Factor that turns a value into a score to be maximised."""
        return 1.0 if self.mode == "max" else -1.0


class Architecture(Section):
    """The space of networks: its name, and everything else as arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    space: Text
    """`chain`, `cell`, `genetic`, `hierarchical`, `modules`, ..., "path/to/file.py:Class" or "package.module:Class"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the space's constructor: every key but `space`."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key != "space"}


class Budget(Section):
    """The budget of a search; the first limit that is reached ends it."""

    trials: Positive | None = None
    """Total number of trials; required by every method but `grid` and `omnivore`."""
    steps_per_trial: Positive | None = None
    """Training steps of each trial, instead of the base's `train.epochs` and `train.steps`; null: the base's
    `train.steps`."""
    epochs_per_trial: Positive | None = None
    """Epochs of each trial, instead of steps: batches of any size see the same data. Methods count in epochs."""
    samples_per_trial: Positive | None = None
    """Samples that each trial trains on, instead of steps; the last step may have more. Methods count in samples."""
    time_limit_s: AboveZero | None = None
    """Seconds after which no trial continues."""
    trial_time_limit_s: AboveZero | None = None
    """Seconds after which a trial is ended; it counts as failed."""
    trial_memory_mb: AboveZero | None = None
    """Megabytes of its process above which a trial is ended; it counts as failed. Not for trials that are gangs."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict | Objective) else value


Start = Annotated[tuple[dict[Text, Any], ...], BeforeValidator(_as_list)]


def _as_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class CallbackSection(Section):
    """A callback of Ray Tune, with the arguments of its class beside `type`."""

    model_config = ConfigDict(extra="allow")

    type: Text
    """Its class: "package.module:Class" or "path/to/file.py:Class"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the class: every key but `type`."""
        return {**(self.model_extra or {})}


def _as_section(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Objectives = Annotated[tuple[Objective, ...], BeforeValidator(_as_list), Field(min_length=1)]


class SearchSection(Section):
    """The method, objectives, spaces and budget of a search."""

    method: AnyMethod
    """Method that proposes the trials."""
    objective: Objectives
    """Objectives of the trials; the first decides which is best, and the Pareto front of all is kept."""
    space: dict[str, Dimension] = Field(default_factory=dict)
    """Dotted keys of the base config, with the values that each may take."""
    architecture: Architecture | None = None
    """Space of networks that replace the task's own."""
    budget: Budget = Budget()
    """Budget of the search."""
    start: Start = ()
    """Values of the first trials: one mapping of keys of `space`, or a list. A key that is left out has the base's
    value or, if that is outside of the space, one that the method proposes."""
    learn_from: Annotated[tuple[Text, ...], BeforeValidator(_as_texts)] = ()
    """Directories of earlier searches, or runs, whose results the method learns from: one, or a list."""
    parallel: Positive = 1
    """Number of concurrent trials."""
    callbacks: tuple[Annotated[CallbackSection, BeforeValidator(_as_section)], ...] = ()
    """Callbacks of Ray Tune, such as its loggers: a class each, or a mapping with the class as `type` and its
    arguments."""
    seed: Seed = 0
    """Seed of the search's random numbers; that of the trials is `base.train.seed`."""

    @property
    def bounds(self) -> dict[str, Bounds]:
        """Bounds of metrics, of all objectives."""
        return {metric: bounds for one in self.objective for metric, bounds in one.subject_to.items()}


class SearchConfig(Section):
    """A config of a search."""

    name: RunName = "search"
    """Name of the search, and of its directory; default: the name of the config's file."""
    base: TrainConfig
    """Base of each trial: the path of a training config, or its content."""
    search: SearchSection
    """Settings of the search."""

    @property
    def first_trials(self) -> list[dict[str, Any]]:
        """The values of `search.start`, completed by those of the base that are inside the space."""
        return [first_trial(self.base, self.search.space, values) for values in self.search.start]

    @property
    def steps_per_trial(self) -> int:
        """Length of each trial, in the unit of the budget: what methods take for steps."""
        budget, train = self.search.budget, self.base.train
        given = (budget.epochs_per_trial, budget.samples_per_trial, budget.steps_per_trial, train.steps)
        length = next((amount for amount in given if amount is not None), None)
        assert length is not None  # checked when it was loaded
        return length

    @property
    def unit(self) -> Literal["steps", "epochs", "samples"]:
        """Unit in which the length of trials is given, and in which methods count."""
        budget = self.search.budget
        if budget.epochs_per_trial is not None:
            return "epochs"
        return "steps" if budget.samples_per_trial is None else "samples"

    @property
    def length_text(self) -> str:
        """Length of each trial in words: `46 steps`, `1 epoch`."""
        length = self.steps_per_trial
        return f"{length} {self.unit}" if length != 1 else f"1 {self.unit.removesuffix('s')}"

    def length_of(self, units: int, batch_size: int) -> dict[str, int | None]:
        """Return `train.epochs` and `train.steps` of a trial, from its length in the unit."""
        if self.unit == "epochs":
            return {"epochs": units, "steps": None}
        return {"epochs": None, "steps": units if self.unit == "steps" else math.ceil(units / batch_size)}

    @property
    def conditions(self) -> Conditions:
        """Conditions under which keys of the space exist."""
        return space_conditions(self.base, self.search.space)

    @property
    def combinations(self) -> Combinations:
        """Combinations of the space's values that the rules of the base refuse."""
        return combinations_of(self)

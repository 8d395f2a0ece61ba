"""What a search config may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from orchestray.platform.config.base import AboveZero, Count, Positive, Section, Text
from orchestray.platform.config.schema import RunName, TrainConfig
from orchestray.platform.config.search.dimensions import Dimension
from orchestray.platform.config.search.measures import MEASURES
from orchestray.platform.config.search.methods import AnyMethod


class Objective(Section):
    """What a trial is judged by."""

    metric: Text
    """Name of a validation metric, or `loss`; or of the built network `parameters`, `flops` or `latency_ms`."""
    mode: Literal["max", "min"] | None = None
    """Whether more is better; null: `min` for a metric that ends with "loss" or "error" and for the network's measures,
    else `max`."""

    @field_validator("mode", mode="after")
    @classmethod
    def _resolve_mode(cls, mode: str | None, info: ValidationInfo) -> str:
        metric = str(info.data.get("metric", ""))
        return mode or ("min" if metric.endswith(("loss", "error")) or metric in MEASURES else "max")

    @property
    def sign(self) -> float:
        """What a value is multiplied by to become a score, of which more is better."""
        return 1.0 if self.mode == "max" else -1.0


class Architecture(Section):
    """The space of networks: its name, and everything else as arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    space: Text
    """`chain`, `cell`, `genetic`, `hierarchical`, `modules`, ..., "path/to/file.py:Class" or "package.module:Class"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the space's constructor is called with: every key but `space`."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key != "space"}


class Budget(Section):
    """How much may be tried. What ends first ends the search."""

    trials: Positive | None = None
    """Trials in all; needed by every method but `grid`."""
    steps_per_trial: Positive | None = None
    """Steps each trial is trained; takes the place of the base's `train.epochs` and `train.steps`; null: the base's
    `train.steps`."""
    time_limit_s: AboveZero | None = None
    """Seconds after which no trial goes on."""
    trial_time_limit_s: AboveZero | None = None
    """Seconds after which a trial is ended, and counts as failed."""
    trial_memory_mb: AboveZero | None = None
    """Megabytes of its process above which a trial is ended, and counts as failed; not for trials that are gangs."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict | Objective) else value


Objectives = Annotated[tuple[Objective, ...], BeforeValidator(_as_list), Field(min_length=1)]


class SearchSection(Section):
    """How the search goes."""

    method: AnyMethod
    """Who says what is tried next."""
    objective: Objectives
    """What trials are judged by; of several the first decides which is best, and the Pareto front of all is kept."""
    space: dict[str, Dimension] = Field(default_factory=dict)
    """Keys of the base config, dotted, and the values each may take."""
    architecture: Architecture | None = None
    """The networks to choose from, in place of the task's own."""
    budget: Budget = Budget()
    """How much may be tried."""
    parallel: Positive = 1
    """Trials at once."""
    seed: Count = 0
    """Seed of everything that the search draws; the trials' own is `base.train.seed`."""


class SearchConfig(Section):
    """A search."""

    name: RunName
    """Name of the search, and of its directory."""
    base: TrainConfig
    """What each trial starts from: the path of a training config, or one itself."""
    search: SearchSection
    """How the search goes."""

    @property
    def steps_per_trial(self) -> int:
        """Steps each trial is trained."""
        steps = self.search.budget.steps_per_trial or self.base.train.steps
        assert steps is not None  # checked when it was loaded
        return steps

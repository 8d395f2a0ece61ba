"""What is said of a trial: the line it leaves, and how it stands while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["succeeded", "stopped", "failed"]
LiveStatus = Literal["running", "waiting", "succeeded", "stopped", "failed"]


@dataclass(frozen=True)
class TrialLine:
    """A line of `trials.jsonl`: what came of a trial. Numbers are as the user named them, not turned."""

    trial: int
    status: Status
    objective: float | None
    """The best it has reported of the first objective; None if it failed before it reported anything."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The dotted keys that were searched, with the values it had at its end."""
    genome: Any = None
    """Its architecture; None: the task's own model."""
    parent: int | None = None
    steps: int = 0
    seconds: float = 0.0
    """That its process worked on it."""
    error: str | None = None
    objectives: Mapping[str, float] | None = None
    """Each objective by its metric, where there are several."""
    parameters: int | None = None
    """Of the built network, where there is a genome."""
    flops: int | None = None
    """Of a forward pass of one sample."""
    latency_ms: float | None = None
    """Of a forward pass of one sample."""
    change: str = ""
    """What was done to its parent, in words."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the line: `reason` of a stop, `rung`, `duplicate_of`. JSON values."""

    def to_json(self) -> dict[str, Any]:
        """The line; what is not known of a network is left out."""
        line: dict[str, Any] = {
            "trial": self.trial,
            "status": self.status,
            "objective": self.objective,
            "config": dict(self.config),
        }
        if self.genome is not None:
            line["genome"] = self.genome
        line |= {"parent": self.parent, "steps": self.steps, "seconds": self.seconds, "error": self.error}
        optional = ("objectives", "parameters", "flops", "latency_ms")
        line |= {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        return {**line, **({"change": self.change} if self.change else {}), **self.more}


@dataclass(frozen=True)
class TrialChange:
    """How a trial stands now, for the display."""

    trial: int
    status: LiveStatus
    step: int = 0
    objective: float | None = None
    """The last it has reported of the first objective, as the user named it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    genome: str | None = None
    """Its architecture, as a person reads it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended; what came of its trials is in its records."""

    status: Literal["succeeded", "failed", "interrupted"]
    best: int | None = None
    """The trial that `best/` was made from; None: the best of the trials' lines."""
    error: str | None = None
    """Why it failed, in a sentence."""

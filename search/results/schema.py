"""The records of a trial: the line written at its end, and its status while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["succeeded", "stopped", "failed"]
LiveStatus = Literal["running", "waiting", "succeeded", "stopped", "failed"]

OUT_OF_TIME = "the search's time limit"
"""Reason of trials that were stopped but continue if the search is given more time."""


@dataclass(frozen=True)
class TrialLine:
    """The line of `trials.jsonl` with the result of a trial. Metrics keep the sign the user gave them."""

    trial: int
    status: Status
    objective: float | None
    """Best reported value of the first objective; None if the trial failed, or was stopped, before its first report."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Maps the dotted keys that were searched to their values at the end of the trial."""
    genome: Any = None
    """Architecture of the trial; None: the task's own model."""
    parent: int | None = None
    steps: int = 0
    seconds: float = 0.0
    """Seconds that its process worked on it."""
    error: str | None = None
    objectives: Mapping[str, float] | None = None
    """Maps the metric of each objective to its value, where there are several."""
    parameters: int | None = None
    """Number of parameters of the network, where there is a genome."""
    flops: int | None = None
    """Number of floating-point operations of a forward pass of one sample."""
    latency_ms: float | None = None
    """Milliseconds of a forward pass of one sample."""
    change: str = ""
    """Description of what was done to its parent."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the line: `reason` of a stop, `rung`, `duplicate_of`; `constraints` (the values that have
    bounds), `feasible` and `violation`; `copies` of the states of other trials, and `copied_bytes`. JSON values.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values, without unknown measures of the network."""
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
    """The current status of a trial, for the display."""

    trial: int
    status: LiveStatus
    step: int = 0
    objective: float | None = None
    """Last reported value of the first objective, with the sign the user gave it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    genome: str | None = None
    """Readable description of its architecture."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    violation: float = 0.0
    """Sum of the bounds that it breaks; 0 if it is feasible."""


@dataclass(frozen=True)
class SearchOutcome:
    """The way a search ended; the results of its trials are in its records."""

    status: Literal["succeeded", "failed", "interrupted"]
    best: int | None = None
    """Trial that `best/` was made from; None: the best according to the lines of the trials."""
    error: str | None = None
    """Reason for the failure, in a sentence."""
    parts: Sequence[str] = ()
    """Classes of the method that proposed the trials."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of `result.json`: `tally`, what the method has counted; `controllers`, the processes of a search
    by policy gradients. JSON values."""


def ended_text(result: Mapping[str, Any]) -> str:
    """Return for example `5 succeeded, 2 stopped; 1 not trained, over a bound`; empty if no trial has ended."""
    counts = result.get("counts") or {}
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    untrained = result.get("untrained")
    return ended + (f"; {untrained} not trained, over a bound" if untrained else "")


def is_untrained(line: Mapping[str, Any]) -> bool:
    """Return True if a trial was only validated, since its network breaks a bound: its objective is of random weights.

    Args:
        line: its line of `trials.jsonl`.
    """
    return line.get("feasible") is False and not line.get("steps")

"""The messages between the driver of a search and the processes of its trials.

A light module: it imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.search.checkpoints.state_files import StateAt
    from orchestray.search.engine.objective import Objectives
    from orchestray.trainers.config.schema import TrainConfig

ORDINARY = "training"
"""Program of trials whose proposal does not name one."""
GANG = "gang"
"""The same for a config with several workers."""


@dataclass(frozen=True)
class TrialTask:
    """A task for a process: to train a trial up to its next report."""

    trial: int
    until: int
    """Step to complete."""
    report: int = 1
    """Number of the report that will result, and hence of the state that the trial reaches."""
    config: TrainConfig | None = None
    """New config of the trial; None: unchanged."""
    begins: bool = False
    """True if the process must build the trial first; otherwise it has it from the previous task."""
    program: str = ORDINARY
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: StateAt | None = None
    """State to resume from; None: its own, or from scratch."""
    partly: bool = False
    """True to take only the weights that fit, and to begin at the first step."""
    overlaps: bool = False
    """True to also take the common part of weights with different shapes, with `partly`."""
    is_exact: bool = False
    """True to resume from `source` and no other state."""
    writes_state: bool = False
    """True to write the reached state to its file before answering: the trial may wait there, or be copied."""
    used_s: float = 0.0
    """Seconds of work up to the last report, if the trial begins in this process: its time limit covers all."""
    bar: float | None = None
    """Score from which the reached state is written in any case, since it may be the best; None: it is not."""


@dataclass(frozen=True)
class TrialLimits:
    """The limits and settings that apply to every trial of a search."""

    objectives: Objectives
    directory: str
    """Directory of the state files."""
    save_every_s: float = 10.0
    """Seconds between two background writes of a trial's state on the way to a report; 0: after each report."""
    time_limit_s: float | None = None
    """Limit on a trial's own working time, in seconds."""
    memory_mb: float | None = None
    """Maximum memory of a trial's process, in MB."""
    num_threads: int = 1
    cpus_per_worker: float | None = None
    """CPUs reserved for each worker of a trial with several; None: the value of its config."""
    logs: str = ""
    """Directory into which the processes write what their trials print; empty: nowhere."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of the user's files that trials import, by path: the same for all, also where the files are not."""


@dataclass(frozen=True)
class TrialResult:
    """A process's answer to a task: the trial's progress, or the reason for its failure."""

    trial: int
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, float], ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False
    is_written: bool = False
    """True if there is a file of the state it has reached."""
    seconds: float = 0.0
    """Seconds that the task took."""
    copied_bytes: int = 0
    """Bytes of the whole state of another trial (weights, optimizer) that it has taken over since its last report."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Measures `parameters`, `flops` and `latency_ms` of a searched network."""
    error: str | None = None
    """Reason for the failure."""
    is_unsaved: bool = False
    """True if its state could not be written: not the trial's fault, which can continue once there is space."""
    is_misnamed: bool = False
    """True if it failed because the task does not have a metric of the objective's name."""
    traceback: str = ""

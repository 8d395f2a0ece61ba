"""What the driver of a search tells the process of a trial, and what that answers.

Light: imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.engine.objective import Objectives
    from orchestray.search.engine.state_files import StatePlace

ORDINARY = "orchestray.search.trials.training:TrainingTrial"
"""The program of a trial whose proposal names none."""
GANG = "orchestray.search.engine.gang_trial:GangTrial"
"""The same of a config with several workers."""


@dataclass(frozen=True)
class Order:
    """Train a trial up to its next report."""

    trial: int
    until: int
    """The step to be completed."""
    report: int = 1
    """The how-manieth report of the trial comes of it: the name of the state it comes to."""
    config: TrainConfig | None = None
    """Of the trial from now on; None: as it was."""
    begins: bool = False
    """Whether the process has to build the trial first: else it has it from the order before."""
    program: str = ORDINARY
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: StatePlace | None = None
    """The state it goes on from; None: its own, or its beginning."""
    partly: bool = False
    """Take only the weights that fit, and begin at the first step."""
    overlaps: bool = False
    """With `partly`: of weights of another shape the part that both have."""
    is_exact: bool = False
    """Go on from `source` and no other state, and have the state that is come to in its file before the answer."""
    used_s: float = 0.0
    """That the trial had worked by its last report, where it begins in this process: its time limit is of the whole."""
    needed: tuple[int, ...] | None = None
    """Trials whose states this process shall keep beside this one's; None: all."""
    bar: float | None = None
    """A state whose score is at least this is written to its file before the answer; None: none is."""


@dataclass(frozen=True)
class Rules:
    """What holds for every trial of a search."""

    objectives: Objectives
    directory: str
    """Of the files of states."""
    save_every_s: float = 10.0
    """Between two writings of a trial's state, beside its work; 0: after each report."""
    time_limit_s: float | None = None
    """Of a trial's own work."""
    memory_mb: float | None = None
    """Most that the process of a trial may hold."""
    num_threads: int = 1
    cpus_per_worker: float | None = None
    """That are set aside for each worker of a trial of several; None: what its config says."""


@dataclass(frozen=True)
class Told:
    """How a trial does, or why it failed."""

    trial: int
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, float], ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False
    is_halted: bool = False
    """Whether it was told to halt on the way: no report, and to go on from its file."""
    place: StatePlace | None = None
    """Where the state it has reached lies."""
    is_written: bool = False
    """Whether that state's file is there already."""
    seconds: float = 0.0
    """That this order took."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """`parameters`, `flops`, `latency_ms` of a searched network."""
    error: str | None = None
    """Why it failed."""
    is_unsaved: bool = False
    """Whether what failed is the writing of its state: no fault of the trial, which can go on once there is room."""
    is_misnamed: bool = False
    """Whether what failed is that the task has no metric of the objective's name."""
    traceback: str = ""

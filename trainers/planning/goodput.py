"""The goodput of a plan whose run fails now and then, and how often it should save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestray.trainers.survey.cluster.failures import Failures, restarting_goodput, young_daly_s

if TYPE_CHECKING:
    from orchestray.trainers.planning.plans import Plan

RESTART_S = 2.0
"""Seconds from a worker's death to the next step (benchmarks/results/recovery.md)."""
_LEAST_CHECKPOINT_S = 1e-3


@dataclass(frozen=True)
class Goodput:
    """The expected goodput of a run that restarts from its last checkpoint after each failure.

    Args:
        share: part of the time that is work which no failure undoes, 0 to 1.
        checkpoint_every_steps: steps between checkpoints that lose least (Young 1974).
        interval_s: their seconds.
        checkpoint_s: seconds of a checkpoint.
    """

    share: float
    checkpoint_every_steps: int
    interval_s: float
    checkpoint_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def failures_of(plan: Plan, *, mtbf_h: float, disk_bytes_per_s: float) -> Failures:
    """Return the failures of a plan's run, as those of one worker.

    Args:
        plan: the plan.
        mtbf_h: mean hours between failures of the run, whatever fails; above 0.
        disk_bytes_per_s: bytes that a file gets in a second.
    """
    checkpoint_s = (plan.memory.parameters + plan.memory.optimizer) / disk_bytes_per_s
    return Failures(1 / (3600 * mtbf_h), max(_LEAST_CHECKPOINT_S, checkpoint_s), RESTART_S)


def goodput_of(plan: Plan, *, mtbf_h: float, disk_bytes_per_s: float) -> Goodput:
    """Return the goodput of a plan's run with checkpoints as often as is best; arguments as above."""
    failures = failures_of(plan, mtbf_h=mtbf_h, disk_bytes_per_s=disk_bytes_per_s)
    steps = max(1, round(young_daly_s(1, failures) / plan.step_s))
    interval_s = steps * plan.step_s
    return Goodput(restarting_goodput(interval_s, 1, failures), steps, interval_s, failures.checkpoint_s)

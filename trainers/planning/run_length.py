"""The length of a run in steps, and the samples of a step: of a run whose batches grow, the mean over its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.platform.data.batch_plan import BatchPlan
from orchestray.platform.data.order import used_samples
from orchestray.trainers.optim.batch_params import Steps
from orchestray.trainers.optim.batch_sizes import changes_by_step

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainSection


@dataclass(frozen=True)
class RunLength:
    """The length of a run.

    Args:
        num_steps: steps of the whole run; 0: unknown.
        steps_per_epoch: steps of an epoch; of a run whose batches grow, the mean over its epochs.
        samples: samples of a step, over all workers; of a run whose batches grow, the mean over its steps.
    """

    num_steps: int
    steps_per_epoch: int
    samples: float


def run_length(train: TrainSection, num_samples: int) -> RunLength:
    """Return the length of a run; batches that grow by measurements count as not growing.

    Args:
        train: its section.
        num_samples: samples of the training data.
    """
    size, schedule = train.batch_size, train.batch_schedule
    used = used_samples(num_samples, size, drop_last=train.drop_last)
    if not isinstance(schedule, Steps):
        per_epoch = BatchPlan(used, size).num_steps(1)
        return RunLength(train.steps or (train.epochs or 0) * per_epoch, per_epoch, size)
    plan = BatchPlan(used, size, changes_by_step(schedule.model_dump(), size, used))
    num_steps = train.steps or plan.num_steps(train.epochs or 0)
    counted = num_steps or plan.num_steps(1)
    samples = plan.samples_before(counted) / counted
    return RunLength(num_steps, max(1, round(used / samples)), samples)

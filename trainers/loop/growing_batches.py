"""Batches that grow during a run: their plan, and their growth by what was measured of the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.data.batch_plan import BatchPlan
from orchestray.platform.errors import ConfigError
from orchestray.trainers.optim.batch_sizes import changes_by_step, measured_size

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.position import Position
    from orchestray.trainers.optim.noise_scale import NoiseScale


def plan_of(settings: ReplicaSettings, stream: SampleStream, position: Position) -> BatchPlan:
    """Return the plan of a run's batches, as far as it is known.

    Args:
        settings: settings of the run.
        stream: samples of the training data.
        position: position in the run.

    Raises:
        ConfigError: the batches are to grow, and the order of the samples depends on their size.
    """
    schedule, size = settings.batch_schedule, stream.batch_size
    if schedule is None:
        return BatchPlan(stream.num_samples, size)
    if not stream.can_resize:
        raise ConfigError(
            "config: train.batch_schedule: data that are mixed or have no end have an order of their own, which is "
            "made for batches of one size; take it out, or train on a table or a dataset"
        )
    if schedule["type"] == "steps":
        return BatchPlan(stream.num_samples, size, changes_by_step(schedule, size, stream.num_samples))
    return BatchPlan(stream.num_samples, size, position.batch_sizes)


def grow(settings: ReplicaSettings, position: Position, noise: NoiseScale, batch_size: int) -> bool:
    """Make the batches larger from the next step on, if what was measured says so; return True then.

    Args:
        settings: settings of the run.
        position: position in the run, which notes the growth.
        noise: what was measured.
        batch_size: samples of a batch now.
    """
    schedule = settings.batch_schedule
    if schedule is None or schedule["type"] == "steps" or position.step % schedule["every_steps"]:
        return False
    size = measured_size(schedule, noise, batch_size)
    if size > batch_size:
        position.batch_sizes = [*position.batch_sizes, [position.step, size]]
    return size > batch_size

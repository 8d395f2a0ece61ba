"""The unit in which a search counts the length of its trials, and the steps of one trial that it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from orchestray.trainers.loop.task_stream import task_stream

if TYPE_CHECKING:
    from orchestray.search.trials.task_cache import TaskCache
    from orchestray.trainers.config.schema import TrainConfig


@dataclass(frozen=True)
class Clock:
    """The number of steps of a trial in a number of units: `num_steps` steps in `num_units` units."""

    num_steps: int = 1
    num_units: int = 1

    @classmethod
    def of(cls, unit: str, batch_size: int, steps_per_epoch: Callable[[], int]) -> Clock:
        """Return the clock of a trial.

        Args:
            unit: `steps`, `epochs` or `samples`.
            batch_size: samples of a step.
            steps_per_epoch: function that returns the steps of an epoch.
        """
        if unit == "epochs":
            return cls(num_steps=steps_per_epoch())
        return cls(num_units=batch_size) if unit == "samples" else cls()

    def steps(self, units: int) -> int:
        """Return the least number of steps that completes a number of units."""
        return -(-units * self.num_steps // self.num_units)

    def reached(self, steps: int, wanted: int) -> int:
        """Return the whole units in a number of steps; the wanted ones, not more, where they are complete."""
        return wanted if steps >= self.steps(wanted) else steps * self.num_units // self.num_steps


def steps_per_epoch(config: TrainConfig, task_cache: TaskCache) -> int:
    """Return the steps of an epoch of a training, without its model.

    Args:
        config: config of a run with one worker.
        task_cache: tasks and data that are there already.
    """
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    task = task_cache.task(settings, device_of(settings))
    source = task_cache.source(settings, task, "train")
    return task_stream(task, source, "train", settings).steps_per_epoch

"""Checks that the layers a config freezes are there, before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.core.frozen_layers import freeze_layers
from orchestray.trainers.core.plain_model import build_plain

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig


def frozen_problems(config: TrainConfig) -> list[str]:
    """Return the problems of `train.freeze` for the config's model, as lines "config: train.freeze: <sentence>".

    A task that cannot be built here yields none.
    """
    try:
        model = build_plain(tasks.build(TaskSource.from_config(config.task)), config.train.seed)
    except (OrchestrayError, OSError):
        return []
    try:
        freeze_layers(model, config.train.freeze)
    except ConfigError as error:
        return list(error.problems)
    return []

"""Checks that the members of an ensemble can share a trunk, before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.core.plain_model import build_plain
from orchestray.trainers.ensemble.member_setup import trunk_names

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig


def trunk_problems(config: TrainConfig) -> list[str]:
    """Return the problems of the trunk for the config's model, as lines "config: strategy.exchange.trunk: <sentence>".

    A task that cannot be built here yields none.
    """
    exchange: Any = config.strategy.exchange
    try:
        task = tasks.build(TaskSource.from_config(config.task, config.train.quantize))
        model = build_plain(task, config.train.seed)
    except (OrchestrayError, OSError):
        return []
    try:
        trunk_names(task, model, exchange.trunk)
    except ConfigError as error:
        return [
            problem if problem.startswith("config: ") else f"config: strategy.exchange.trunk: {problem}"
            for problem in error.problems
        ]
    return []

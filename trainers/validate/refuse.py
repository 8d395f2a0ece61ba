"""Refusal of layouts that a model does not fit, before anything is written or started. Imports torch only if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig

_FEW_SHARDS = 16
"""Number of parameters that almost every model has.

With at most this number of shards the model is not built to check; servers refuse it when they start.
"""


def check_layout(config: TrainConfig, *, label: str = "config") -> None:
    """Check the layout against the model.

    Args:
        config: config of the run.
        label: the file's name in messages.

    Raises:
        ConfigError: lists every problem.
    """
    network = config.strategy.network
    problems: list[str] = []
    if network.tensor > 1 or network.pipeline > 1:  # unsplit models fit any number of workers
        from orchestray.trainers.validate.layout import layout_problems

        problems += layout_problems(config)
    exchange = config.strategy.exchange
    if exchange.type == "parameter_server" and exchange.shards > _FEW_SHARDS:
        from orchestray.trainers.validate.layout import shard_problems

        problems += shard_problems(config)
    if exchange.type == "allreduce" and network.data > 1 and config.strategy.aggregation.type != "mean":
        from orchestray.trainers.validate.layout import aggregation_problems

        problems += aggregation_problems(config)
    if exchange.type == "independent" and exchange.trunk:
        from orchestray.trainers.validate.trunk import trunk_problems

        problems += trunk_problems(config)
    if config.train.freeze:
        from orchestray.trainers.validate.frozen import frozen_problems

        problems += frozen_problems(config)
    if config.distill is not None:
        from orchestray.trainers.validate.teacher import teacher_problems

        problems += teacher_problems(config)
    if problems:
        raise ConfigError([f"{label}: {problem.removeprefix('config: ')}" for problem in problems])

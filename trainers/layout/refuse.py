"""Refusing what a model cannot be laid out as, before anything is written or started. Imports torch only if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig

_FEW_SHARDS = 16
"""As many parameters hardly a model lacks: it is not built to see that, and servers refuse it when they start."""


def check_layout(config: TrainConfig, *, label: str = "config") -> None:
    """Hold the layout against the model.

    Args:
        config: of the run.
        label: the file's name in messages.

    Raises:
        ConfigError: with every problem.
    """
    network = config.strategy.network
    problems: list[str] = []
    if network.tensor > 1 or network.pipeline > 1:  # whole models fit any number of workers
        from orchestray.trainers.layout.checks import layout_problems

        problems += layout_problems(config)
    exchange = config.strategy.exchange
    if exchange.type == "parameter_server" and exchange.shards > _FEW_SHARDS:
        from orchestray.trainers.layout.checks import shard_problems

        problems += shard_problems(config)
    if exchange.type == "allreduce" and network.data > 1 and config.strategy.aggregation.type != "mean":
        from orchestray.trainers.layout.checks import aggregation_problems

        problems += aggregation_problems(config)
    if exchange.type == "independent" and exchange.trunk:
        from orchestray.trainers.consolidation.setting_up import trunk_problems

        problems += trunk_problems(config)
    if config.distill is not None:
        from orchestray.trainers.consolidation.teaching import teacher_problems

        problems += teacher_problems(config)
    if problems:
        raise ConfigError([f"{label}: {problem.removeprefix('config: ')}" for problem in problems])

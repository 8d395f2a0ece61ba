"""Refusing what a model cannot be laid out as, before anything is written or started. Imports torch only if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig


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
    if exchange.type == "independent" and exchange.trunk:
        from orchestray.trainers.consolidation.setting_up import trunk_problems

        problems += trunk_problems(config)
    if config.distill is not None:
        from orchestray.trainers.consolidation.teaching import teacher_problems

        problems += teacher_problems(config)
    if problems:
        raise ConfigError([f"{label}: {problem.removeprefix('config: ')}" for problem in problems])

"""What a worker does before it trains a member of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.consolidation.answers import EnsembleTask
from orchestray.trainers.layout.checks import build_plain
from orchestray.trainers.pipeline.cutting import layers_of

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.collective import Collective
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.platform.task import Task
    from orchestray.trainers.exchange.independent import Independent


def in_ensemble(task: Task, exchange: Mapping[str, Any], members: Callable[[], Collective]) -> EnsembleTask:
    """The task as a member learns it: validated together with the others.

    Args:
        task: the user's.
        exchange: the config's section.
        members: gives the group of this worker and its like in the other members.
    """
    return EnsembleTask(task, exchange["average"], members)


def share_trunk(exchange: Independent, task: Task, model: nn.Module) -> None:
    """Tell the exchange which tensors are the trunk's.

    Raises:
        ConfigError: the model has too few layers, or they cannot be found.
    """
    if exchange.num_trunk_layers:
        exchange.share(trunk_names(task, model, exchange.num_trunk_layers))


def trunk_names(task: Task, model: nn.Module, num_layers: int) -> list[str]:
    """Names of the parameters and persistent buffers of the first layers, in the model's order.

    Layers are those a pipeline may cut between: what the task's `layers(model)` lists, an nn.Sequential's children, or
    what tracing finds.

    Raises:
        ConfigError: there are no layers beyond them, or none of them has parameters.
    """
    layers = layers_of(task, model, num_layers + 1)
    found = len(layers)
    if num_layers >= found:
        raise ConfigError(
            f"config: strategy.exchange.trunk: the model has {found} layers, and members that share {num_layers} of "
            f"them would be one model; at most {found - 1} can be shared"
        )
    first = set(layers.part(0, num_layers).state_dict())
    names = [name for name in model.state_dict() if name in first]
    if not any(name in names for name, _ in model.named_parameters()):
        raise ConfigError(
            f"config: strategy.exchange.trunk: the first {num_layers} layers ({', '.join(layers.names[:num_layers])}) "
            "have no parameters to share; count a layer for each module that is called"
        )
    return names


def trunk_problems(config: TrainConfig) -> list[str]:
    """What is wrong with the trunk for the config's model, as lines "config: strategy.exchange.trunk: <sentence>".

    Of a task that cannot be built here nothing is said.
    """
    exchange: Any = config.strategy.exchange
    try:
        task = tasks.build(TaskSource.from_config(config.task))
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

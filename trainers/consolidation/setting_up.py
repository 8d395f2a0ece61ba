"""What a worker does before it trains a member of an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.consolidation.answers import EnsembleTask
from orchestray.trainers.layout.checks import build_plain
from orchestray.trainers.pipeline.cutting import layers_of
from orchestray.trainers.replica import agreement

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.collective import Collective
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.exchange.independent import Independent
    from orchestray.trainers.replica.settings import ReplicaSettings


class Members:
    """What the members of an ensemble learn, each as it is validated together with the others."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        group: Callable[[], Collective],
        task_of: Callable[[int], Task] | None = None,
    ) -> None:
        """
        Args:
            task: the user's.
            settings: of the run.
            group: gives the group of this worker and its like in the other members.
            task_of: the user's task with a member's own arguments; default: `task`.
        """
        self._average = settings.exchange["average"]
        self._group = group
        self._differ = settings.has_own_tasks
        self._task_of = task_of
        self.task = EnsembleTask(task, self._average, group)
        """Of a member that has no arguments of its own."""
        self._made: dict[int, EnsembleTask] = {}

    def task_of(self, member: int) -> EnsembleTask:
        """What a member learns; the same object whenever it is asked for."""
        if not self._differ or self._task_of is None:
            return self.task
        if member not in self._made:
            own = self._task_of(member)
            self._made[member] = EnsembleTask(own, self._average, self._group, check_shapes=True)
        return self._made[member]

    def check(self, stream_of: Callable[[str, int], SampleStream], member: int, world: Collective) -> None:
        """Hold the members' samples against each other, where they have arguments of their own. All workers call.

        Raises:
            ConfigError: they are not as many.
        """
        if not self._differ:
            return
        own = {split: stream_of(split, member).num_samples for split in ("train", "validation")}
        told = agreement.gather_json(world, {"member": member, **own})
        for split in own:
            counts = {each["member"]: each[split] for each in told}
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"{count} (member {index})" for index, count in sorted(counts.items()))
                raise ConfigError(
                    f"config: strategy.exchange.members: the members are trained in step and validated together, but "
                    f"their {split} data differ in samples: {listed}; give them arguments that change the model alone"
                )


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

"""The tasks of the members of an ensemble, and the setup of a worker that trains one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestray.platform.comm import objects
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.task_calls import refuse
from orchestray.trainers.ensemble.answers import EnsembleTask
from orchestray.trainers.parallel.pipeline.cutting import layers_of

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.sync.local.independent import Independent


class Members:
    """The tasks of the members of an ensemble, each wrapped for validation together with the others."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        group: Callable[[], Collective],
        task_of: Callable[[int], Task] | None = None,
    ) -> None:
        """Initialise with the user's task.

        Args:
            task: the user's task.
            settings: settings of the run.
            group: returns the group of this worker and its counterparts in the other members.
            task_of: returns the user's task with a member's own arguments; default: `task`.
        """
        refuse(task, ("final_metrics", "gather"), "ensembles", "train its members as runs of their own")
        self._average = settings.exchange["average"]
        self._group = group
        self._differ = settings.has_own_tasks
        self._task_of = task_of
        self.task = EnsembleTask(task, self._average, group)
        """Task of a member without arguments of its own."""
        self._made: dict[int, EnsembleTask] = {}

    def task_of(self, member: int) -> EnsembleTask:
        """Return a member's task; the same object at each call."""
        if not self._differ or self._task_of is None:
            return self.task
        if member not in self._made:
            own = self._task_of(member)
            self._made[member] = EnsembleTask(own, self._average, self._group, check_shapes=True)
        return self._made[member]

    def check(self, stream_of: Callable[[str, int], SampleStream], member: int, world: Collective) -> None:
        """Compare the members' numbers of samples if they have arguments of their own. All workers call.

        Args:
            stream_of: returns a member's samples of a split.
            member: this worker's member.
            world: all workers.

        Raises:
            ConfigError: the numbers differ.
        """
        if not self._differ:
            return
        own = {split: stream_of(split, member).num_samples for split in ("train", "validation")}
        gathered = objects.gather_json(world, {"member": member, **own})
        for split in own:
            counts = {each["member"]: each[split] for each in gathered}
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"{count} (member {index})" for index, count in sorted(counts.items()))
                raise ConfigError(
                    f"config: strategy.exchange.members: the members are trained in step and validated together, but "
                    f"their {split} data differ in samples: {listed}; give them arguments that change the model alone"
                )


def share_trunk(exchange: Independent, task: Task, model: nn.Module) -> None:
    """Declare the tensors of the trunk to the exchange.

    Raises:
        ConfigError: the model has too few layers, or they cannot be found.
    """
    if exchange.num_trunk_layers:
        exchange.share(trunk_names(task, model, exchange.num_trunk_layers))


def trunk_names(task: Task, model: nn.Module, num_layers: int) -> list[str]:
    """Return the names of the parameters and persistent buffers of the first layers, in the model's order.

    Layers are those between which a pipeline may cut: those listed by the task's `layers(model)`, an nn.Sequential's
    children, or those found by tracing.

    Raises:
        ConfigError: the model has no further layers, or none of the first ones has parameters.
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

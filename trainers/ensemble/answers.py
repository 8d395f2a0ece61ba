"""The outputs of an ensemble whose members are on different workers, for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from orchestray.platform.comm import objects
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.members import member_name
from orchestray.trainers.core.task_calls import loss_of
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.ensemble.ensemble import Average, log_of, probabilities

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.task import Batch, Task

_GROUP = "ensemble"


class EnsembleTask(WrappedTask):
    """A task whose metrics are those of the mean of all members' outputs, and of each member.

    Training does not communicate. In a validation every member must call `metrics` with the same batches in the same
    order: their outputs are averaged over the group. The result has the task's metrics and `loss` of the ensemble, and
    "members.<i>.<name>" of each member. It is the same on every worker.
    """

    def __init__(
        self, task: Task, average: Average, members: Callable[[], Collective], *, check_shapes: bool = False
    ) -> None:
        """Initialise with the user's task.

        Args:
            task: the user's task.
            average: the values that are averaged.
            members: returns the group of this worker and its counterparts in the other members. The operations run in a
            sibling group, so that they do not count as the exchange's.
            check_shapes: True if the members' models may differ, so that the shapes of their outputs are compared
            before they are averaged.
        """
        super().__init__(task)
        self._average = average
        self._members = members
        self._check_shapes = check_shapes

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        group = self._members().sibling(_GROUP)
        own = self._judge(outputs, batch)
        if self._check_shapes:
            check_alike(group, outputs, list(own))
        answered = self._judge(mean_over(group, outputs, self._average), batch)
        table = group.all_gather(torch.stack([value.detach().double().cpu() for value in own.values()]))
        alone = {
            member_name(index, name): value
            for index, row in enumerate(table.unbind(0))
            for name, value in zip(own, row.unbind(0), strict=True)
        }
        return {**answered, **alone}

    def _judge(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return {"loss": loss_of(self.task, outputs, batch, **self.given), **self.task.metrics(outputs, batch)}


def check_alike(group: Collective, outputs: Any, metrics: Sequence[str]) -> None:
    """Check that the outputs and metrics of all members have the same form. All members call.

    Args:
        group: all members.
        outputs: this member's outputs.
        metrics: names of this member's metrics.

    Raises:
        ConfigError: the members' outputs have different shapes, or their metrics different names.
    """
    shapes = [list(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(outputs)]
    gathered = objects.gather_json(group, [shapes, list(metrics)])
    different = next((index for index, each in enumerate(gathered) if each != gathered[0]), None)
    if different is not None:
        first, other = gathered[0], gathered[different]
        raise ConfigError(
            "config: strategy.exchange.members: the members answer together with one mean, and member 0 answers with "
            f"tensors of shapes {first[0]} and metrics {first[1]}, member {different} with {other[0]} "
            f"and {other[1]}; give them arguments that keep both"
        )


@torch.no_grad()
def mean_over(group: Collective, outputs: Any, average: Average) -> Any:
    """Return the mean of every member's outputs, the same on each. All members call.

    With "probabilities" it is the logarithm of the mean of their softmax, so that a loss of logits is that of the mean.

    Args:
        group: all members.
        outputs: a pytree of tensors.
        average: the values that are averaged.

    Raises:
        PeerLostError: another member is gone.
    """
    leaves, structure = pytree.tree_flatten(probabilities(outputs) if average == "probabilities" else outputs)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for index in places:
        leaf = leaves[index]
        total = (
            leaf.detach()
            .to(torch.float64 if leaf.dtype == torch.float64 else torch.float32)
            .clone(memory_format=torch.contiguous_format)
        )
        group.all_reduce(total)
        leaves[index] = (total / group.size).to(leaf.dtype)
    mean = pytree.tree_unflatten(leaves, structure)
    return log_of(mean) if average == "probabilities" else mean

"""The answers of an ensemble whose members are on different workers: what a validation measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from orchestray.platform.errors import ConfigError
from orchestray.trainers.consolidation.ensemble import Average, log_of, probabilities
from orchestray.trainers.consolidation.members import member_name
from orchestray.trainers.consolidation.wrapped import WrappedTask
from orchestray.trainers.replica import agreement

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.task import Batch, Task

_GROUP = "ensemble"


class EnsembleTask(WrappedTask):
    """A task whose metrics are those of the mean of all members' outputs, and of each member alone.

    In training nothing is sent. In a validation every member must call `metrics` with the same batches in the same
    order: their outputs are averaged over the group. Beside the task's metrics and `loss` of the ensemble there are
    "members.<i>.<name>" of each member; all are the same on every worker.
    """

    def __init__(
        self, task: Task, average: Average, members: Callable[[], Collective], *, check_shapes: bool = False
    ) -> None:
        """
        Args:
            task: what is learned.
            average: what the mean is taken of.
            members: gives the group of this worker and its like in the other members. The operations run in a group of
                their own beside it, so that they do not count as the exchange's.
            check_shapes: whether the members' models may be of different make: before their outputs are averaged it is
                seen whether they are alike.
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
        return {"loss": self.task.loss(outputs, batch), **self.task.metrics(outputs, batch)}


def check_alike(group: Collective, outputs: Any, metrics: Sequence[str]) -> None:
    """See that all members answer alike. All members call.

    Raises:
        ConfigError: they answer with tensors of different shapes, or are measured by different metrics.
    """
    shapes = [list(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(outputs)]
    told = agreement.gather_json(group, [shapes, list(metrics)])
    different = next((index for index, each in enumerate(told) if each != told[0]), None)
    if different is not None:
        raise ConfigError(
            "config: strategy.exchange.members: the members answer together with one mean, and member 0 answers with "
            f"tensors of shapes {told[0][0]} and metrics {told[0][1]}, member {different} with {told[different][0]} "
            f"and {told[different][1]}; give them arguments that keep both"
        )


@torch.no_grad()
def mean_over(group: Collective, outputs: Any, average: Average) -> Any:
    """The mean of every member's outputs, a pytree of tensors, the same on each. All members call.

    With "probabilities" the logarithm of the mean of their softmax: a loss of logits is then that of the mean.

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

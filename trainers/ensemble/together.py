"""An ensemble as one model, trained by a loss that knows of it.

Lee, Purushwalkam, Cogswell, Crandall and Batra, "Why M Heads are Better than One: Training a Diverse Ensemble of Deep
Networks" (2015), section 4: by the loss of the averaged answer, instead of their own, members become diverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orchestray.trainers.core.task_calls import Gather, alone, loss_of
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.ensemble.ensemble import Average, log_mean_of, mean_of

if TYPE_CHECKING:
    from orchestray.platform.task import Batch, Task

_OUTPUTS = "outputs of the members"
_OF_THE_MODEL = ("layers", "tensor_plan", "export_files")
"""Optional methods of a task that know its model, which is only a part of this one."""


class Together(nn.Module):
    """Members that are called with the same inputs.

    In training it returns the outputs of each, for the loss of an `EnsembleLossTask`; in evaluation their mean, and for
    "probabilities" the logarithm of that, so that it answers with logits.
    """

    def __init__(self, members: Iterable[nn.Module], average: Average) -> None:
        """
        Args:
            members: models whose outputs have the same shapes.
            average: the values that are averaged.
        """
        super().__init__()
        self.members = nn.ModuleList(members)
        self.average = average

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = [member(*inputs, **named) for member in self.members]
        return {_OUTPUTS: outputs} if self.training else answer_of(outputs, self.average)

    def extra_repr(self) -> str:
        return f"average={self.average}"


def answer_of(outputs: Sequence[Any], average: Average) -> Any:
    """Return the answer of an ensemble, by which gradients reach each member's outputs."""
    if average == "outputs":
        return mean_of(outputs)
    return log_mean_of(outputs)


class EnsembleLossTask(WrappedTask):
    """A task whose model has several members, with the loss w L(answer) + (1 - w) mean of L(member).

    Metrics, and the loss of a validation, are those of the answer.
    """

    def __init__(self, task: Task, *, members: int, weight: float, average: Average) -> None:
        """
        Args:
            task: the task of one member.
            members: number of members.
            weight: w, from 0 to 1.
            average: the values that are averaged.
        """
        super().__init__(task)
        self._num_members, self._weight, self._average = members, weight, average

    def build_model(self) -> nn.Module:
        return Together([self.task.build_model() for _ in range(self._num_members)], self._average)

    def loss(self, outputs: Any, batch: Batch, *, step: int = 1, gather: Gather = alone) -> Tensor:
        self.given = {"step": step, "gather": gather}
        if not (isinstance(outputs, dict) and _OUTPUTS in outputs):
            return loss_of(self.task, outputs, batch, **self.given)
        members = outputs[_OUTPUTS]
        terms = []
        if self._weight:
            answer = answer_of(members, self._average)
            terms.append(self._weight * loss_of(self.task, answer, batch, **self.given))
        if self._weight < 1:
            share = (1 - self._weight) / len(members)
            terms += [share * loss_of(self.task, output, batch, **self.given) for output in members]
        total: Tensor = sum(terms[1:], start=terms[0])
        return total

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_MODEL:
            raise AttributeError(name)
        return super().__getattr__(name)

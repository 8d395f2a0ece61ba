"""Distillation: one network learns from the outputs of another, or of an ensemble.

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2. It only changes the loss, so
it works with any layout of the network and any exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.inputs import arguments, call, described, inputs_of
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.rng import generators_put_back
from orchestray.trainers.core.task_calls import Gather, alone, has_totals, loss_of, refuse
from orchestray.trainers.core.weights import convert
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.ensemble.ensemble import Ensemble, class_dimension

if TYPE_CHECKING:
    import os

    from orchestray.platform.task import Batch, Task

_KEY = "config: distill.teacher"


class DistilledTask(WrappedTask):
    """A task whose loss includes the distance of its outputs from a teacher's.

    loss = (1 - weight) task.loss + weight distance. With integer `targets` that have all dimensions of the outputs but
    one, the outputs are logits. The distance is then T^2 KL(teacher || student), both softened by the temperature T,
    averaged over samples and positions. T^2 keeps the gradient's size as T changes (section 2, last paragraph). With
    floating-point targets it is the mean squared error of the outputs, and the temperature has no effect.

    A validation reports the whole loss as `loss` and the task's own as `task_loss`.
    """

    def __init__(
        self,
        task: Task,
        teacher: Callable[[], nn.Module],
        *,
        temperature: float = 2.0,
        weight: float = 0.5,
    ) -> None:
        """Initialise with the user's task.

        Args:
            task: the user's task.
            teacher: creates the teacher at the first loss: workers that compute no loss hold no teacher.
            temperature: above 0.
            weight: from 0 to 1.

        Raises:
            ConfigError: the loss of the task is divided by a weight of its own.
        """
        refuse(
            task,
            ("weight",),
            "distillation, where the distance from the teacher is a mean over samples",
            "have loss return a mean over samples, or take distill out",
        )
        super().__init__(task)
        self._make_teacher = teacher
        self._teacher: nn.Module | None = None
        self._temperature = temperature
        self._weight = weight
        self._without_gradients = WithoutGradients()

    def loss(self, outputs: Any, batch: Batch, *, step: int = 1, gather: Gather = alone) -> Tensor:
        """Return the weighted sum of the task's loss and the distance from the teacher.

        Raises:
            ConfigError: the teacher's outputs have another shape, or are neither logits nor numbers.
        """
        self.given = {"step": step, "gather": gather}
        if self._weight == 0:
            return loss_of(self.task, outputs, batch, **self.given)
        away = distance(outputs, self.teacher_outputs(batch), batch, self._temperature)
        if self._weight == 1:
            return away
        own = loss_of(self.task, outputs, batch, **self.given)
        return (1 - self._weight) * own + self._weight * away

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        found = self.task.metrics(outputs, batch)
        if has_totals(self.task):
            return found
        return {**found, "task_loss": loss_of(self.task, outputs, batch, **self.given)}

    @torch.no_grad()
    def teacher_outputs(self, batch: Batch) -> Any:
        """Return the teacher's outputs for a batch; the logarithms, if it is an ensemble of probabilities."""
        if self._teacher is None:
            with generators_put_back():  # building it draws random weights, in the middle of a step
                self._teacher = self._make_teacher().eval().requires_grad_(False)
        inputs, teacher = inputs_of(batch), self._teacher
        try:
            if isinstance(teacher, Ensemble):
                args, kwargs = arguments(inputs)
                return teacher.logits(*args, **kwargs)
            return self._without_gradients(lambda given: call(teacher, given), inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{_KEY}: the teacher cannot take this task's inputs, {described(inputs)}: {error}. Teach with a run "
                "of a task that has the same inputs"
            ) from error


def with_distillation(
    task: Task, distill: Mapping[str, Any] | None, *, double: bool, device: torch.device | str = "cpu"
) -> Task:
    """Return the task, wrapped for distillation if the config has a `distill` section.

    Args:
        task: the user's task.
        distill: the section as a mapping; None without one.
        double: True if the student computes in float64; else float32.
        device: the student's device.
    """
    if distill is None:
        return task
    return DistilledTask(
        task,
        lambda: load_teacher(distill["teacher"], double=double, device=device),
        temperature=distill["temperature"],
        weight=distill["weight"],
    )


def load_teacher(directory: str | os.PathLike[str], *, double: bool, device: torch.device | str = "cpu") -> nn.Module:
    """Load the trained model of a run directory.

    Args:
        directory: directory of a finished run, which every worker's machine must have.
        double: True if the student computes in float64; else float32.
        device: the student's device.

    Raises:
        OrchestrayError: the directory has no run, or the run has no trained model.
    """
    from orchestray.trainers.saved.run import load_run

    return convert(load_run(directory).load_model(), torch.float64 if double else torch.float32).to(device)


def distance(outputs: Any, teacher_outputs: Any, batch: Batch, temperature: float) -> Tensor:
    """Return the distance of outputs from a teacher's, as a scalar; `DistilledTask` defines it.

    Raises:
        ConfigError: they cannot be compared.
    """
    targets = batch.get("targets")
    if problem := problem_of(outputs, teacher_outputs, targets):
        raise ConfigError(f"{_KEY}: {problem}")
    if targets is not None and not targets.is_floating_point():
        return soft_divergence(outputs, teacher_outputs, temperature, class_dimension(outputs, targets))
    return functional.mse_loss(outputs, teacher_outputs)


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float, dim: int = -1) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)) along `dim`, averaged over all other dimensions.

    A class that the teacher rules out by a logit of minus infinity adds nothing: 0 log 0 is 0.
    """
    goal = (teacher / temperature).log_softmax(dim)
    found = (student / temperature).log_softmax(dim)
    each = functional.kl_div(found, goal, reduction="none", log_target=True).masked_fill(goal.isneginf(), 0.0)
    return each.sum(dim).mean() * temperature**2


def problem_of(outputs: Any, teacher_outputs: Any, targets: Tensor | None) -> str | None:
    """Return why outputs cannot be compared with a teacher's, as part of a sentence; None if they can."""
    if not isinstance(outputs, Tensor) or not isinstance(teacher_outputs, Tensor):
        return (
            f"distillation compares one tensor with another; the student answers with {described(outputs)}, the "
            f"teacher with {described(teacher_outputs)}"
        )
    if outputs.shape != teacher_outputs.shape:
        return (
            f"the teacher answers a batch with {described(teacher_outputs)}, the student with {described(outputs)}; "
            "teach with a run whose task has the same outputs"
        )
    if targets is None:
        return "the task's batches have no `targets`, which tell logits of classes from numbers"
    if targets.is_floating_point():
        return None
    dims = range(1, outputs.dim())
    fitting = [dim for dim in dims if (*outputs.shape[:dim], *outputs.shape[dim + 1 :]) == tuple(targets.shape)]
    if fitting and max(outputs.shape[dim] for dim in fitting) == 1:
        return (
            "the outputs have one logit a sample, whose softmax is 1 whatever it is, so that nothing could be learned "
            "from the teacher; answer with a logit for each of two classes, or give the targets as numbers"
        )
    if fitting:
        return None
    return (
        f"the targets are integers, {described(targets)}, but no dimension of the outputs, {described(outputs)}, "
        "counts their classes"
    )

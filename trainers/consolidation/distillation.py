"""Distillation: one network learns from the outputs of another, or of an ensemble.

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2. It is another loss, so it
works under any layout of the network and any exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.consolidation.ensemble import Ensemble, class_dimension
from orchestray.trainers.consolidation.wrapped import WrappedTask

if TYPE_CHECKING:
    import os

    from orchestray.platform.task import Batch, Task

_KEY = "config: distill.teacher"


class DistilledTask(WrappedTask):
    """A task whose loss is partly the distance of the outputs from a teacher's.

    loss = (1 - weight) task.loss + weight distance. With integer `targets` that have all dimensions of the outputs but
    one, the outputs are logits, and the distance is T^2 KL(teacher || student), both softened by the temperature T: the
    mean over samples and positions. T^2 keeps the gradient's size as T changes (section 2, last paragraph). With
    floating-point targets it is the mean squared error of the outputs, and the temperature has no meaning.

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
        """
        Args:
            task: what is learned.
            teacher: makes the teacher when the first loss is computed: workers that compute none hold no teacher.
            temperature: above 0.
            weight: from 0 to 1.
        """
        super().__init__(task)
        self._make_teacher = teacher
        self._teacher: nn.Module | None = None
        self._temperature = temperature
        self._weight = weight

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """
        Raises:
            ConfigError: the teacher's outputs are of another shape, or neither logits nor numbers.
        """
        if self._weight == 0:
            return self.task.loss(outputs, batch)
        away = distance(outputs, self.taught(batch), batch, self._temperature)
        if self._weight == 1:
            return away
        return (1 - self._weight) * self.task.loss(outputs, batch) + self._weight * away

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return {**self.task.metrics(outputs, batch), "task_loss": self.task.loss(outputs, batch)}

    @torch.no_grad()
    def taught(self, batch: Batch) -> Any:
        """The teacher's outputs for a batch; of an ensemble of probabilities their logarithms."""
        if self._teacher is None:
            with torch.random.fork_rng([]):  # its weights are drawn before they are loaded, amid a step
                self._teacher = self._make_teacher().eval().requires_grad_(False)
        inputs = batch["inputs"]
        try:
            return self._teacher.logits(inputs) if isinstance(self._teacher, Ensemble) else self._teacher(inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{_KEY}: the teacher cannot take this task's inputs, {_described(inputs)}: {error}. Teach with a run "
                "of a task that has the same inputs"
            ) from error


def learned_from(
    task: Task, distill: Mapping[str, Any] | None, *, double: bool, device: torch.device | str = "cpu"
) -> Task:
    """The task, learned from another run's outputs too if a config's `distill` section (as a mapping) says so."""
    if distill is None:
        return task
    return DistilledTask(
        task,
        lambda: load_teacher(distill["teacher"], double=double, device=device),
        temperature=distill["temperature"],
        weight=distill["weight"],
    )


def load_teacher(directory: str | os.PathLike[str], *, double: bool, device: torch.device | str = "cpu") -> nn.Module:
    """The trained model of a run directory.

    Args:
        directory: of a finished run; it must be there on every worker's machine.
        double: whether the student computes in float64; else float32.
        device: the student's.

    Raises:
        OrchestrayError: there is no run, or no trained model in it.
    """
    from orchestray.platform.run.load import load_run

    return load_run(directory).load_model().to(device, torch.float64 if double else torch.float32)


def distance(outputs: Any, taught: Any, batch: Batch, temperature: float) -> Tensor:
    """How far outputs are from a teacher's, a scalar; see `DistilledTask`.

    Raises:
        ConfigError: they cannot be compared.
    """
    targets = batch.get("targets")
    if problem := problem_of(outputs, taught, targets):
        raise ConfigError(f"{_KEY}: {problem}")
    if targets is not None and not targets.is_floating_point():
        return soft_divergence(outputs, taught, temperature, class_dimension(outputs, targets))
    return functional.mse_loss(outputs, taught)


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float, dim: int = -1) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) along `dim`, the mean over everything else."""
    goal = (teacher / temperature).log_softmax(dim)
    found = (student / temperature).log_softmax(dim)
    each = functional.kl_div(found, goal, reduction="none", log_target=True).sum(dim)
    return each.mean() * temperature**2


def problem_of(outputs: Any, taught: Any, targets: Tensor | None) -> str | None:
    """Why outputs cannot be compared with a teacher's, as the rest of a sentence; None if they can."""
    if not isinstance(outputs, Tensor) or not isinstance(taught, Tensor):
        return (
            f"distillation compares one tensor with another; the student answers with {_described(outputs)}, the "
            f"teacher with {_described(taught)}"
        )
    if outputs.shape != taught.shape:
        return (
            f"the teacher answers a batch with {_described(taught)}, the student with {_described(outputs)}; teach "
            "with a run whose task has the same outputs"
        )
    if targets is None:
        return "the task's batches have no `targets`, which tell logits of classes from numbers"
    if targets.is_floating_point():
        return None
    shapes = [(*outputs.shape[:dim], *outputs.shape[dim + 1 :]) for dim in range(1, outputs.dim())]
    if tuple(targets.shape) in shapes:
        return None
    return (
        f"the targets are integers, {_described(targets)}, but no dimension of the outputs, {_described(outputs)}, "
        "counts their classes"
    )


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

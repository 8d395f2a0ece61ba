"""Calls of a task's loss and metrics, with what its signature asks for, in the form in which they are added up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.task import OPTIONAL_METHODS, asked_by
from orchestray.trainers.core.members import is_loss

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.task import Batch, Task

Gather = Callable[[Any], Any]
"""A function that joins the tensors of all replicas."""
TOTAL = "total "
"""Prefix of the values of a task with `final_metrics` among the sums."""
_KEPT_NAMES = frozenset({"step", "epoch", "time_s", "split", "event"})
"""Keys of a metric line that say what line it is, so that no metric may have their names."""


def alone(values: Any) -> Any:
    """Return the values of a single replica, which are all there are."""
    return values


def loss_of(task: Task, outputs: Any, batch: Batch, *, step: int = 1, gather: Gather = alone) -> Tensor:
    """Return a task's loss, given the step and the gathering function if it asks for them."""
    given = {"step": step, "gather": gather}
    return task.loss(outputs, batch, **{name: given[name] for name in asked_by(task)})


def refuse(task: Task, names: Collection[str], scheme: str, advice: str) -> None:
    """Refuse a task that uses any of these of its optional methods and of the arguments that its loss may ask for.

    Raises:
        ConfigError: it does.
    """
    uses = [name for name in OPTIONAL_METHODS if callable(getattr(task, name, None))] + [*asked_by(task)]
    if refused := [name for name in uses if name in names]:
        raise ConfigError(f"config: task.type: the task uses {' and '.join(refused)}, unknown to {scheme}; {advice}")


def has_totals(task: Task) -> bool:
    """Return True if the task's metrics are totals, from which `final_metrics` makes the metrics."""
    return callable(getattr(task, "final_metrics", None))


def measure(task: Task, outputs: Any, batch: Batch, *, loss: Tensor, num_samples: int, weight: float) -> dict[str, Any]:
    """Return the loss and the metrics of a micro-batch, in a form that `add` adds up.

    Args:
        task: the task.
        outputs: outputs of the model.
        batch: the micro-batch.
        loss: its loss.
        num_samples: number of samples, by which metrics are weighted.
        weight: weight of the loss.
    """
    sums: dict[str, Any] = {"loss": weighted("loss", loss, weight)}
    found = named("metrics", task.metrics(outputs, batch))
    if has_totals(task):
        return sums | {TOTAL + name: _addend(name, value) for name, value in found.items()}
    return sums | {
        name: weighted(f"metric {name!r}", value, weight if is_loss(name) else num_samples)
        for name, value in found.items()
    }


def weighted(name: str, value: Any, weight: float) -> float:
    """Return a number times its weight; a loss of weight 0 counts nothing, also if it is NaN.

    Args:
        name: its name, for messages.
        value: a number, or a tensor of one.
        weight: its weight.

    Raises:
        TrainingError: it is none.
    """
    if not isinstance(value, SupportsFloat) or (isinstance(value, Tensor) and value.numel() != 1):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TrainingError(
            f"The task's {name} must be one number, the mean over the samples; it is {got}. Reduce it, for example "
            "with .mean()."
        )
    return float(value.detach() if isinstance(value, Tensor) else value) * weight if weight else 0.0


def named(method: str, found: Any) -> dict[str, Any]:
    """Return what a method of the task gave as its metrics, by name.

    Raises:
        ConfigError: it is not a dict, or has a name that a metric line cannot have.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"The task's {method} must return a dict of numbers; it returned {found!r}.")
    if kept := sorted(_KEPT_NAMES.intersection(found)):
        raise ConfigError(
            f"The task's {method} returned a metric of the name {kept[0]!r}, which says what a line of metrics.jsonl "
            "is about. Give it another name."
        )
    return {str(name): value for name, value in found.items()}


def refuse_other_names(known: Collection[str], found: Collection[str]) -> None:
    """Refuse metrics that are not of every micro-batch: their mean over all samples is unknown.

    Raises:
        TrainingError: the names differ. Totals need not be in all, as what is not there adds nothing.
    """
    ours, others = ({name for name in names if not name.startswith(TOTAL)} for names in (known, found))
    if differ := sorted(ours ^ others):
        raise TrainingError(
            f"The task's metrics returned {differ[0]!r} for some batches, and not for others. A metric is a mean over "
            "all samples: return the same names for every batch, or sums and counts of which a method "
            "final_metrics(totals) makes the metric."
        )


def add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what `measure` returned for another micro-batch: numbers and tensors by their sum, lists at their end.

    Raises:
        TrainingError: the metrics have other names than before.
    """
    if sums and more:
        refuse_other_names(sums, more)
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def gather_totals(world: Collective, totals: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the totals of every rank, in the order of ranks, on every rank."""
    kinds = objects.gather_json(world, {name: isinstance(value, list) for name, value in totals.items()})
    tensors = {name: torch.cat(value) if isinstance(value, list) else value for name, value in totals.items()}
    gathered: list[dict[str, Any]] = []
    for rank, is_list in enumerate(kinds):
        shared = objects.share_tensors(world, tensors, rank)
        gathered.append({name: [value] if is_list[name] else value for name, value in shared.items()})
    return gathered


def finish(task: Task, sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a task makes from its totals.

    Raises:
        ConfigError: the task's `final_metrics` does not return numbers by name.
    """
    totals = {
        name.removeprefix(TOTAL): torch.cat(value) if isinstance(value, list) else value
        for name, value in sums.items()
        if name.startswith(TOTAL)
    }
    found = named("final_metrics", task.final_metrics(totals))  # type: ignore[attr-defined]  # `has_totals`
    try:
        return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"The task's final_metrics must return a dict of numbers; it returned {found!r}.") from error


def _addend(name: str, value: Any) -> Any:
    """Return a value of `metrics` such that nothing is lost in the sum.

    Raises:
        ConfigError: it is a list of something else than tensors with a first dimension.
    """
    if isinstance(value, list | tuple):
        if any(not isinstance(part, Tensor) or not part.dim() for part in value):
            raise ConfigError(
                f"The task's metrics returned a list for {name!r} that holds more than tensors with a first dimension, "
                "along which final_metrics gets them joined. Return a list of one tensor, such as "
                "[torch.tensor(values)]."
            )
        return [part.detach().cpu() for part in value]
    tensor = torch.as_tensor(value).detach().cpu()
    return tensor.double() if tensor.is_floating_point() or tensor.dim() == 0 else tensor.to(torch.int64)

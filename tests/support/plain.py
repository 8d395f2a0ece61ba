"""Training in plain single-process PyTorch: a backward pass for each batch, an optimizer of `torch.optim`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from orchestray.platform.data.nested import map_tensors
from orchestray.trainers.core.rng import building
from orchestray.trainers.core.weights import convert
from support.layouts import LaidOut, layout_settings
from support.training import stream_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of `layout_settings`."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_call(model: nn.Module, inputs: Any) -> Any:
    """Call a model as its user would."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def train_plainly(
    task: Any,
    make: MakeOptimizer = sgd,
    *,
    steps: int,
    grad_clip: float | None = None,
    joins: bool = True,
    validates: bool = False,
    **train: Any,
) -> LaidOut:
    """Train on the samples of a run, in its order.

    Args:
        task: task to learn.
        make: makes the optimizer.
        steps: number of steps.
        grad_clip: largest norm of the gradient.
        joins: False to call the model for each micro-batch, for one that depends on the samples beside.
        validates: True to validate at the end.
        train: keys of `train`, such as the batch size.
    """
    settings = layout_settings(steps=steps, **train)
    placed = _double if settings.precision == "float64" else _as_it_is
    with building(settings.seed):
        model = task.build_model()
    if settings.precision == "float64":
        convert(model, torch.float64)
    optimizer, stream = make(model.parameters()), stream_of(task, settings)("train", 0)
    losses: list[float] = []
    while len(losses) < steps:
        with stream.epoch(len(losses) // stream.steps_per_epoch) as shares:
            for share in shares:
                if len(losses) == steps:
                    break
                batches = [map_tensors(placed, part.batch) for part in share.micro_batches]
                fractions = [part.weight / share.weight for part in share.micro_batches]
                if joins:
                    batches, fractions = [join(batches)], [1.0]
                optimizer.zero_grad()
                losses.append(0.0)
                for batch, fraction in zip(batches, fractions, strict=True):
                    loss = plain_loss(task, model, batch, step=len(losses)) * fraction
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses[-1] += loss.item()
                if grad_clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                optimizer.step()
    trained = LaidOut(losses, {}, None)  # type: ignore[arg-type]
    if validates:
        with stream_of(task, settings)("validation", 0).epoch(0) as shares, torch.no_grad():
            parts = [part for share in shares for part in share.micro_batches]
            model.eval()
            found = [plain_loss(task, model, map_tensors(placed, part.batch), step=steps).item() for part in parts]
        sums = sum(part.weight * loss for part, loss in zip(parts, found, strict=True))
        trained.validation = sums / sum(part.weight for part in parts)
    trained.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return trained


def plain_loss(task: Any, model: nn.Module, batch: Any, *, step: int) -> torch.Tensor:
    """Return the loss of a batch, of which a single process has all samples."""
    asked = inspect.signature(task.loss).parameters
    given = {name: value for name, value in {"step": step, "gather": _as_it_is}.items() if name in asked}
    loss: torch.Tensor = task.loss(plain_call(model, batch["inputs"]), batch, **given)
    return loss


def join(batches: list[Any]) -> Any:
    """Join the micro-batches of a batch."""
    parts = [iter(_tensors(batch)) for batch in batches]
    return map_tensors(lambda _tensor: torch.cat([next(part) for part in parts]), batches[0])


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return found


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_it_is(value: Any) -> Any:
    return value

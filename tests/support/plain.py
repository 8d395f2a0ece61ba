"""Training in plain single-process PyTorch: whole batches, one backward pass each, an optimizer of `torch.optim`."""

from __future__ import annotations

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
    task: Any, make: MakeOptimizer = sgd, *, steps: int, grad_clip: float | None = None, **train: Any
) -> LaidOut:
    """Train on the samples of a run, in its order, in double precision.

    Args:
        task: task to learn.
        make: makes the optimizer.
        steps: number of steps.
        grad_clip: largest norm of the gradient.
        train: keys of `train`, such as the batch size.
    """
    settings = layout_settings(steps=steps, **train)
    with building(settings.seed):
        model = convert(task.build_model(), torch.float64)
    optimizer, stream = make(model.parameters()), stream_of(task, settings)("train", 0)
    losses: list[float] = []
    while len(losses) < steps:
        with stream.epoch(len(losses) // stream.steps_per_epoch) as shares:
            for share in shares:
                if len(losses) == steps:
                    break
                batches = [map_tensors(_double, part.batch) for part in share.micro_batches]
                batch = join(batches)
                loss = task.loss(plain_call(model, batch["inputs"]), batch)
                optimizer.zero_grad()
                loss.backward()
                if grad_clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                optimizer.step()
                losses.append(loss.item())
    return LaidOut(losses, {name: value.detach() for name, value in model.state_dict().items()}, None)  # type: ignore[arg-type]


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

"""Parameters that a task's loss has for itself: no optimizer knows them, as it has the model's alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from orchestray.platform.errors import TrainingError


def refuse_own_parameters(task: object, model: nn.Module) -> None:
    """Refuse a task that has parameters which are not the model's, and to which the loss has given gradients.

    Args:
        task: the task, after a pass backward.
        model: the model, or this worker's part of it.

    Raises:
        TrainingError: the training would not move them.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for name, parameter in _held("", task):
        if parameter.grad is not None and id(parameter) not in known:
            raise TrainingError(
                f"The task's loss has the parameter {name!r} of its own, which the training would not move: it trains "
                "the model's alone. Have build_model return a module that holds it, and that returns what the loss "
                "needs of it. If it is not to be trained, give it requires_grad_(False)."
            )


def _held(name: str, value: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a task holds, by their names in it; of what a wrapped task holds, too."""
    if isinstance(value, nn.Parameter):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from value.named_parameters(name)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            if isinstance(each, nn.Module | nn.Parameter):
                yield from _held(f"{name}.{number}", each)
    elif not name or callable(getattr(value, "build_model", None)):
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for key, each in parts.items():
            yield from _held(str(key), each)

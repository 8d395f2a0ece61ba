"""The subject of an analysis: a model with inputs and a loss, from a config or a class, on `meta` or another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.data.source import first_row
from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import Task, TaskSource, build_task, load_object
from orchestray.trainers import tasks
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.core.inputs import call
from orchestray.trainers.core.plain_model import build_plain
from orchestray.trainers.saved.interface import example_of

META = torch.device("meta")


@dataclass(frozen=True)
class Subject:
    """A model to analyse.

    Args:
        name: name of the model or the run.
        model: the model, in training mode.
        inputs: a batch of inputs, on the model's device.
        batch_size: samples of the batch; for a module alone, the first size of its first input, whatever that is.
        loss: returns the loss of the outputs; None: the outputs are added up.
        notes: what a reader has to know, as clauses.
        task: the task that made the model; None: a module alone.
        batch_bytes: bytes of the whole batch, with what the loss takes.
        resize: returns the same with another number of samples; None: not known how.
    """

    name: str
    model: nn.Module
    inputs: Any
    batch_size: int
    loss: Callable[[Any], Tensor] | None = None
    notes: tuple[str, ...] = ()
    task: Task | None = None
    batch_bytes: int = 0
    resize: Callable[[int], Subject] | None = None

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        outputs = call(self.model, self.inputs)
        if self.loss is not None:
            return self.loss(outputs)
        summed = [each.sum() for each in tensors_in(outputs) if each.is_floating_point() or each.is_complex()]
        return torch.stack([each.abs() if each.is_complex() else each for each in summed]).sum()


def subject_of(
    source: str, overrides: Sequence[str] = (), shapes: Sequence[str] = (), *, device: torch.device = META
) -> Subject:
    """Return what a user names.

    Args:
        source: a train config (YAML), or `file.py:Class` or `module:Class` of a task, or of a module or a function that
            returns one.
        overrides: `key.path=value`, for a config.
        shapes: shapes of the inputs of a module, such as "1,3,224,224" or "8,128:int64".
        device: device of the model and its inputs.

    Raises:
        ConfigError: the config, or a shape, is wrong, or the class needs shapes.
        TaskError: the class cannot be imported or built.
    """
    if source.endswith(".py"):
        raise ConfigError(f"{source}: name the class in it as well, as {source}:Model")
    if source.endswith((".yaml", ".yml")) or Path(source).is_file():
        _refuse_unused("--inputs", shapes, f"{source} has the inputs of its task")
        config = load_train_config(source, list(overrides))
        task = tasks.build(TaskSource.from_config(config.task, config.train))
        return _of_task(config.name or Path(source).stem, task, config.train.batch_size, config.train.seed, device)
    _refuse_unused("keys of a config", overrides, f"{source} is none")
    made: Any = load_object(TaskSource.of_class(source, {}, noun="model"), key="analyse")
    name = source.rpartition(":")[2]
    if isinstance(made, type) and not issubclass(made, nn.Module) and hasattr(made, "build_model"):
        _refuse_unused("--inputs", shapes, f"the task {source} has its own")
        return _of_task(name, build_task(TaskSource.of_class(source, {})), 1, 0, device)
    if not shapes:
        raise ConfigError(
            f"{source}: give the shapes of its inputs, as it takes them: --inputs 8,3,224,224 "
            "(for whole numbers --inputs 8,128:int64; once for each input)"
        )
    try:
        with device:
            model = made()
    except Exception:  # noqa: BLE001 - a model may need values, to compute its sizes
        model = made()
    inputs = tuple(_input(shape, device) for shape in shapes)
    note = "no loss: the outputs are added up"
    subject = Subject(name, _moved(model, device).train(), inputs, len(inputs[0]), None, (note,))
    if any(is_lazy(each) for each in subject.model.parameters()):  # lazy layers have no shapes before they are called
        try:
            subject.forward()
        except Exception as error:
            raise TaskError(
                f"{name} cannot be run, as its lazy layers must be: {type(error).__name__}: {error}"
            ) from error
    return subject


def _refuse_unused(what: str, given: Sequence[str], why: str) -> None:
    """Raise if arguments are given that would not count."""
    if given:
        raise ConfigError(f"{what} ({', '.join(given)}): {why}; leave them out")


def _of_task(name: str, task: Task, batch_size: int, seed: int, device: torch.device) -> Subject:
    model = _moved(build_plain(task, seed) if device == META else task.build_model(), device).train()

    def resize(num_samples: int) -> Subject:
        return _of_task(name, task, num_samples, seed, device)

    try:
        batch = _repeated(task.to_batch(first_row(task)), batch_size, device)
    except Exception as error:  # noqa: BLE001 - of any kind: the task's own code, or data that is elsewhere
        note = f"no loss: the task's data cannot be read here ({type(error).__name__}); the outputs are added up"
        inputs = map_tensors(lambda one: one.to(device).expand(batch_size, *one.shape), example_of(task))
        return Subject(name, model, inputs, batch_size, None, (note,), task)
    subject = Subject(
        name,
        model,
        batch["inputs"],
        batch_size,
        lambda outputs: task.loss(outputs, batch),
        task=task,
        batch_bytes=sum(each.numel() * each.element_size() for each in tensors_in(batch)),
        resize=resize,
    )
    try:
        subject.forward()
    except OrchestrayError:
        raise
    except Exception as error:  # noqa: BLE001 - a loss may look at values
        note = f"the loss is left out, as it needs values ({type(error).__name__}); the outputs are added up"
        return replace(subject, loss=None, notes=(note,))
    return subject


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on a device, with its tied parameters still tied: `to` makes new ones, each apart, on `meta`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to(device)
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, model.get_parameter(first))
    return model


def _repeated(batch: Mapping[str, Any], batch_size: int, device: torch.device) -> dict[str, Any]:
    """Return a batch of one sample as one of many."""
    whole: dict[str, Any] = map_tensors(
        lambda one: one.to(device).expand(batch_size, *one.shape[1:]) if one.dim() else one.to(device), dict(batch)
    )
    return whole


def _input(shape: str, device: torch.device) -> Tensor:
    """Return an input of zeros.

    Raises:
        ConfigError: it is not a shape, or torch has no such type.
    """
    sizes, _, kind = shape.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        wanted = [int(size) for size in sizes.split(",")]
    except ValueError:
        wanted = [0]
    if not isinstance(dtype, torch.dtype) or min(wanted) < 1:
        raise ConfigError(
            f"--inputs: must be sizes, with a type of torch after a colon, as 8,3,224,224 or 8,128:int64, got {shape!r}"
        )
    return torch.zeros(wanted, dtype=dtype, device=device)

"""A task whose model begins as a run's config says: with drawn or saved weights, frozen layers, normalised weights."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint_files import MODEL_FILE
from orchestray.platform.run.model_files import HUFFMAN_FILE, MODEL_JSON
from orchestray.trainers.core.buffer_kinds import apply_kinds
from orchestray.trainers.core.drawn_weights import draw_weights
from orchestray.trainers.core.extra_state import encode
from orchestray.trainers.core.frozen_layers import freeze_layers
from orchestray.trainers.core.kept_weights import keep
from orchestray.trainers.core.model_state import ModelState, load_state
from orchestray.trainers.core.weight_norm import folded_for, normalise_weights
from orchestray.trainers.core.weights import convert, model_tensors
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.few_bits.layers import renamed
from orchestray.trainers.saved.trained_model import read_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from orchestray.platform.task import Task
    from orchestray.trainers.core.initial_model import InitialModel

_KEY = "config: train.init_from"


class InitialisedTask(WrappedTask):
    """A task whose `build_model` changes the model of another task before it is trained."""

    def __init__(self, task: Task, initial: InitialModel) -> None:
        """
        Args:
            task: the other task.
            initial: changes of its model, made in the order: drawn, loaded, frozen, normalised.
        """
        super().__init__(task)
        self._initial = initial
        self._made: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        """Return what was done to the model that was built last, as JSON values.

        Of `drawn` weights it has the number of tensors and the root of their mean square. `loaded` is the number of
        tensors that were taken from elsewhere. `frozen` is the number of values that are not trained.
        """
        return dict(self._made)

    def build_model(self) -> nn.Module:
        """Return the task's model, changed.

        Raises:
            ConfigError: the model or the saved weights do not fit what the config says.
        """
        initial, model = self._initial, self.task.build_model()
        made: dict[str, Any] = {}
        self._made = made
        if initial.init is not None:
            drawn = draw_weights(model, initial.init, initial.init_gain)
            made["drawn"] = {"tensors": len(drawn), "root_mean_square": _root_mean_square(drawn)}
        if initial.init_from is not None:
            made["loaded"] = _load(model, initial.init_from, initial)
        if initial.freeze:
            freeze_layers(model, initial.freeze)
            made["frozen"] = sum(each.numel() for each in model.parameters() if not each.requires_grad)
        if initial.weight_norm:
            normalise_weights(model)
        return model


def with_initial_weights(task: Task, initial: InitialModel) -> Task:
    """Return a task whose model begins as `initial` says; the task itself if that changes nothing."""
    return InitialisedTask(task, initial) if initial.changes else task


def initial_summary(task: Task) -> dict[str, Any]:
    """Return `InitialisedTask.summary` of a task or of one that it wraps; empty if there is none."""
    while isinstance(task, WrappedTask):
        if isinstance(task, InitialisedTask):
            return task.summary()
        task = task.task
    return {}


def _root_mean_square(tensors: Sequence[Tensor]) -> float:
    squares = sum(float(each.detach().double().square().sum()) for each in tensors)
    return math.sqrt(squares / sum(each.numel() for each in tensors))


def _load(model: nn.Module, place: str, initial: InitialModel) -> int:
    """Load saved weights into a model that was just built, but for those that are left out.

    Returns:
        The number of tensors that were loaded.

    Raises:
        ConfigError: there are none, they are those of another model, or a pattern of what is left out fits nothing.
    """
    saved = folded_for(model, _read(place))
    saved = replace(saved, tensors=renamed(model, saved.tensors))
    if initial.precision == "float64":
        convert(model, torch.float64)
    num_kept = 0
    if initial.init_except:
        saved, num_kept = _without(model, saved, place, initial.init_except)
    try:
        apply_kinds(model, saved.buffers)
        load_state(model, saved)
    except CheckpointError as error:
        raise ConfigError(
            f"{_KEY}: {place} is not of this model: {error}. If these may begin afresh, as a new head does, name them "
            "in train.init_except"
        ) from error
    if initial.init_keeps is not None:
        keep(model, initial.init_keeps)
    return len(saved.tensors) - num_kept


def _without(model: nn.Module, saved: ModelState, place: str, patterns: Sequence[str]) -> tuple[ModelState, int]:
    """Return a saved state in which what fits a pattern is that of the model, and the number of those tensors."""
    own = model_tensors(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*own, *saved.tensors)):
            raise ConfigError(
                f"config: train.init_except: nothing in the model or in {place} has a name like {pattern!r}"
            )

    def is_left_out(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    taken = {name: tensor for name, tensor in saved.tensors.items() if not is_left_out(name)}
    kept = {name: tensor.clone() for name, tensor in own.items() if is_left_out(name)}
    buffers = {name: kind for name, kind in saved.buffers.items() if not is_left_out(name)}
    return replace(saved, tensors={**taken, **kept}, buffers=buffers), len(kept)


def _read(place: str) -> ModelState:
    """Return the model of a run, of a folder with `model.safetensors`, or of a file.

    Raises:
        ConfigError: there is none.
    """
    from safetensors.torch import load_file

    path = Path(place)
    names = (MODEL_FILE, HUFFMAN_FILE)
    files = [path, *(folder / name for folder in (path, path / "model") for name in names)]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{_KEY}: there are no weights at {place}; wanted a finished run, a folder with {MODEL_FILE}, or a file of "
            "safetensors or of torch.save"
        )
    try:
        if found.name in names and found.with_name(MODEL_JSON).is_file():
            return read_model(found.parent)
        if found.suffix == ".safetensors":
            return ModelState(load_file(found))
        saved: dict[str, Any] = torch.load(found, map_location="cpu", weights_only=True)
        others = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
        return ModelState({name: value for name, value in saved.items() if name not in others}, encode(others))
    except Exception as error:  # each format has errors of its own
        raise ConfigError(f"{_KEY}: {found} cannot be read: {str(error).splitlines()[0]}") from error

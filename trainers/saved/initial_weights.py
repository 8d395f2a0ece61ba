"""A task whose model begins as a run's config says: with drawn or saved weights, frozen layers, normalised weights."""

from __future__ import annotations

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

    def build_model(self) -> nn.Module:
        """Return the task's model, changed.

        Raises:
            ConfigError: the model or the saved weights do not fit what the config says.
        """
        initial, model = self._initial, self.task.build_model()
        if initial.init is not None:
            draw_weights(model, initial.init, initial.init_gain)
        if initial.init_from is not None:
            _load(model, initial.init_from, initial)
        if initial.freeze:
            freeze_layers(model, initial.freeze)
        if initial.weight_norm:
            normalise_weights(model)
        return model


def with_initial_weights(task: Task, initial: InitialModel) -> Task:
    """Return a task whose model begins as `initial` says; the task itself if that changes nothing."""
    return InitialisedTask(task, initial) if initial.changes else task


def _load(model: nn.Module, place: str, initial: InitialModel) -> None:
    """Load saved weights into a model that was just built, but for those that are left out.

    Raises:
        ConfigError: there are none, they are those of another model, or a pattern of what is left out fits nothing.
    """
    saved = folded_for(model, _read(place))
    saved = replace(saved, tensors=renamed(model, saved.tensors))
    if initial.precision == "float64":
        convert(model, torch.float64)
    if initial.init_except:
        saved = _without(model, saved, place, initial.init_except)
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


def _without(model: nn.Module, saved: ModelState, place: str, patterns: Sequence[str]) -> ModelState:
    """Return a saved state in which what fits a pattern is that of the model."""
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
    return replace(saved, tensors={**taken, **kept}, buffers=buffers)


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

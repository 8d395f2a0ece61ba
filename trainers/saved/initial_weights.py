"""A task whose model starts with saved weights, from a run, a folder of Hugging Face, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint_files import MODEL_FILE
from orchestray.platform.run.model_files import HUFFMAN_FILE, MODEL_JSON
from orchestray.trainers.core.buffer_kinds import apply_kinds
from orchestray.trainers.core.extra_state import encode
from orchestray.trainers.core.kept_weights import keep
from orchestray.trainers.core.model_state import ModelState, load_state
from orchestray.trainers.core.weights import convert
from orchestray.trainers.ensemble.wrapped import WrappedTask
from orchestray.trainers.saved.trained_model import read_model

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.task import Task
    from orchestray.trainers.core.kept_weights import Kept

_KEY = "config: train.init_from"


class InitialisedTask(WrappedTask):
    """A task whose `build_model` loads weights into the model of another task."""

    def __init__(self, task: Task, place: str, precision: str = "float32", keeps: Kept | None = None) -> None:
        """
        Args:
            task: the other task.
            place: a run, a folder with `model.safetensors`, or a file.
            precision: `train.precision`; weights of float64 are not rounded on their way into a model of float64.
            keeps: what training keeps of the weights, see `keep`.
        """
        super().__init__(task)
        self._place, self._precision, self._keeps = place, precision, keeps

    def build_model(self) -> nn.Module:
        """Return the task's model with the saved weights.

        Raises:
            ConfigError: there are none, or they are those of another model.
        """
        model, saved = self.task.build_model(), _read(self._place)
        if self._precision == "float64":
            convert(model, torch.float64)
        try:
            apply_kinds(model, saved.buffers)
            load_state(model, saved)
        except CheckpointError as error:
            raise ConfigError(f"{_KEY}: {self._place} is not of this model: {error}") from error
        if self._keeps is not None:
            keep(model, self._keeps)
        return model


def with_initial_weights(task: Task, place: str | None, precision: str, keeps: Kept | None = None) -> Task:
    """Return a task whose model starts with the weights at `place`; the task itself if that is None."""
    return task if place is None else InitialisedTask(task, place, precision, keeps)


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

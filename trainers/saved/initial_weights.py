"""A task whose model starts with saved weights, from a run, a folder of Hugging Face, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from orchestray.platform.errors import ConfigError
from orchestray.trainers.ensemble.wrapped import WrappedTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from orchestray.platform.task import Task

_KEY = "config: train.init_from"
_NUM_SHOWN = 3


class InitialisedTask(WrappedTask):
    """A task whose `build_model` loads weights into the model of another task."""

    def __init__(self, task: Task, place: str) -> None:
        super().__init__(task)
        self._place = place

    def build_model(self) -> nn.Module:
        """Return the task's model with the saved weights.

        Raises:
            ConfigError: there are none, or they are those of another model.
        """
        model, saved = self.task.build_model(), _read(self._place)
        own = model.state_dict(keep_vars=True)
        loaded = {own[name].data_ptr() for name in saved if name in own}
        missing = [name for name, tensor in own.items() if name not in saved and tensor.data_ptr() not in loaded]
        strange = [name for name in saved if name not in own]
        if missing or strange:
            lacks = f"it lacks {_listed(missing)}" if missing else f"the model has no {_listed(strange)}"
            raise ConfigError(f"{_KEY}: {self._place} is not of this model: {lacks}; build the model that was saved")
        try:
            model.load_state_dict(saved, strict=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ConfigError(f"{_KEY}: {self._place} does not fit the model: {reason}") from error
        return model


def with_initial_weights(task: Task, place: str | None) -> Task:
    """Return a task whose model starts with the weights at `place`; the task itself if that is None."""
    return task if place is None else InitialisedTask(task, place)


def _read(place: str) -> dict[str, Tensor]:
    """Return the tensors of a run, of a folder with `model.safetensors`, or of a file.

    Raises:
        ConfigError: there are none.
    """
    from safetensors.torch import load_file

    path = Path(place)
    files = [path, path / "model.safetensors", path / "model" / "model.safetensors"]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{_KEY}: there are no weights at {place}; wanted a finished run, a folder with model.safetensors, or a "
            "file of safetensors or of torch.save"
        )
    try:
        if found.suffix == ".safetensors":
            return dict(load_file(found))
        return dict(torch.load(found, map_location="cpu", weights_only=True))
    except Exception as error:  # each format has errors of its own
        raise ConfigError(f"{_KEY}: {found} cannot be read: {str(error).splitlines()[0]}") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more

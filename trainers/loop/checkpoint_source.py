"""A checkpoint that was found, to be read as a whole or one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.checkpoint import (
    latest_good,
    load_tensors,
    stream_checkpoint,
)
from orchestray.platform.run.checkpoint_files import (
    EXCHANGE_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RESUME_FILE,
    best_checkpoint,
)
from orchestray.trainers.core.members import first_member
from orchestray.trainers.core.model_state import BUFFER, ModelState
from orchestray.trainers.core.weight_norm import folded
from orchestray.trainers.loop.sharded_state import Streams
from orchestray.trainers.saved.checkpoint_model import BUFFERS, load_model

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.run.checkpoint import Found
    from orchestray.trainers.config.settings import ReplicaSettings


class Loaded:
    """A checkpoint from which a replica resumes."""

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def state(self) -> Mapping[str, Any]:
        """The trainer's own state: position and metric lines."""
        return self._found.state

    def model(self) -> ModelState:
        """Return the state of the model; of an ensemble, that of its first member.

        Raises:
            CheckpointError, StorageError: the checkpoint is damaged, or cannot be read.
        """
        tensors = load_tensors(self._found, MODEL_FILE)
        beside = load_tensors(self._found, RESUME_FILE) if RESUME_FILE in self._found.files else {}
        if self.state.get("members"):
            named = first_member({name.removeprefix(BUFFER): tensor for name, tensor in beside.items()})
            return ModelState(first_member(tensors), {BUFFER + name: tensor for name, tensor in named.items()})
        return ModelState(tensors, beside, self.state.get(BUFFERS, {}))

    def optimizer(self) -> Mapping[str, Tensor]:
        """Return the tensors of the optimizer; of an ensemble, those of its first member.

        Raises:
            CheckpointError, StorageError: the checkpoint is damaged, or cannot be read.
        """
        tensors = load_tensors(self._found, OPTIMIZER_FILE)
        return first_member(tensors) if self.state.get("members") else tensors

    def streams(self) -> Streams:
        """Return the same tensors one at a time, with the replicas' own tensors and the state."""
        model, optimizer = (stream_checkpoint(self._found, file) for file in (MODEL_FILE, OPTIMIZER_FILE))
        exchange = stream_checkpoint(self._found, EXCHANGE_FILE) if EXCHANGE_FILE in self._found.files else None
        resume = stream_checkpoint(self._found, RESUME_FILE) if RESUME_FILE in self._found.files else ((), ())
        return Streams(model, optimizer, exchange, self.state, resume)


def newest(storage: str | None, known: Found | None) -> Loaded | None:
    """Return the newest checkpoint, from `storage` or the known one; None if there is none."""
    there = latest_good(storage)[0] if storage is not None else None
    candidates = [found for found in (there, known) if found is not None]
    return Loaded(max(candidates, key=lambda found: int(found.step))) if candidates else None


def exported(settings: ReplicaSettings, trained: ModelState) -> ModelState:
    """Return the model that a run ends with: that of its best checkpoint if it is to be exported, with plain weights.

    Args:
        settings: settings of the run, whose last checkpoint is complete.
        trained: model after the last step.

    Raises:
        CheckpointError: the best checkpoint is damaged.
    """
    storage = settings.checkpoint_storage
    if settings.best is not None and settings.best.export and storage is not None:
        best = best_checkpoint(storage)
        trained = trained if best is None else load_model(best)
    return folded(trained) if settings.initial.weight_norm else trained

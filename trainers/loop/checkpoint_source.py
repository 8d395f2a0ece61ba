"""A checkpoint that was found, to be read as a whole or one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.checkpoint import (
    latest_good,
    load_checkpoint,
    stream_checkpoint,
)
from orchestray.platform.run.checkpoint_files import EXCHANGE_FILE, MODEL_FILE, OPTIMIZER_FILE, best_checkpoint
from orchestray.trainers.loop.sharded_state import Streams
from orchestray.trainers.saved.checkpoint_model import load_model

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

    def tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return all tensors of the model and all tensors of the optimizer.

        Raises:
            CheckpointError, StorageError: the checkpoint is damaged, or cannot be read.
        """
        model, optimizer, _ = load_checkpoint(self._found)
        return model, optimizer

    def streams(self) -> Streams:
        """Return the same tensors one at a time, with the replicas' own tensors and the state."""
        model, optimizer = (stream_checkpoint(self._found, file) for file in (MODEL_FILE, OPTIMIZER_FILE))
        exchange = stream_checkpoint(self._found, EXCHANGE_FILE) if EXCHANGE_FILE in self._found.files else None
        return Streams(model, optimizer, exchange, self.state)


def newest(storage: str | None, known: Found | None) -> Loaded | None:
    """Return the newest checkpoint, from `storage` or the known one; None if there is none."""
    there = latest_good(storage)[0] if storage is not None else None
    candidates = [found for found in (there, known) if found is not None]
    return Loaded(max(candidates, key=lambda found: int(found.step))) if candidates else None


def exported(settings: ReplicaSettings, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of the model that a run ends with: those of its best checkpoint if it is to be exported.

    Args:
        settings: settings of the run, whose last checkpoint is complete.
        trained: tensors of the model after the last step.

    Raises:
        CheckpointError: the best checkpoint is damaged.
    """
    storage = settings.checkpoint_storage
    if settings.best is None or not settings.best.export or storage is None:
        return trained
    best = best_checkpoint(storage)
    return trained if best is None else load_model(best)

"""A checkpoint that was found, to be read whole or one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.checkpoint import load_checkpoint, stream_checkpoint
from orchestray.platform.run.checkpoint_files import MODEL_FILE, OPTIMIZER_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.run.checkpoint import Found
    from orchestray.trainers.sharded_state import Source


class Loaded:
    """What a replica goes on from."""

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def state(self) -> Mapping[str, Any]:
        """The trainer's own state: position, lines."""
        return self._found.state

    def tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The model's tensors and the optimizer's, all at once.

        Raises:
            CheckpointError, StorageError: it is damaged, or cannot be read.
        """
        model, optimizer, _ = load_checkpoint(self._found)
        return model, optimizer

    def streams(self) -> tuple[Source, Source, Mapping[str, Any]]:
        """The same one tensor at a time, and the state."""
        model, optimizer = (stream_checkpoint(self._found, file) for file in (MODEL_FILE, OPTIMIZER_FILE))
        return model, optimizer, self.state

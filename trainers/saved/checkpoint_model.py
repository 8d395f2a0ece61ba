"""The model of a checkpoint, as the run validated it: with the average of its weights, if it keeps one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.run.checkpoint import load_tensors, stream_checkpoint
from orchestray.platform.run.checkpoint_files import MODEL_FILE, OPTIMIZER_FILE, RESUME_FILE
from orchestray.trainers.core.extra_state import of_extra
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.optim.averaged import AVERAGE

if TYPE_CHECKING:
    from orchestray.platform.run.checkpoint_files import Found

BUFFERS = "buffers"
"""Key of a checkpoint's state, and of `model.json`, for the buffers that are not as the model was built with them."""
HAS_AVERAGE = "has_average"
"""Key of a checkpoint's state: True if the optimizer's tensors have an average of the weights."""


def load_model(found: Found, *, is_averaged: bool = True) -> ModelState:
    """Return the model of a checkpoint, on the CPU, without what only going on needs.

    Args:
        found: the checkpoint.
        is_averaged: False for the weights themselves, where the run keeps an average of them.

    Raises:
        CheckpointError: the checkpoint is damaged.
        StorageError: the checkpoint cannot be read.
    """
    tensors = load_tensors(found, MODEL_FILE)
    if is_averaged and found.state.get(HAS_AVERAGE):
        described, slots = stream_checkpoint(found, OPTIMIZER_FILE)
        for (key, *_), tensor in zip(described, slots, strict=True):
            name, _, slot = key.rpartition(".")
            if slot == AVERAGE and name in tensors:
                tensors[name] = tensor
    beside = load_tensors(found, RESUME_FILE) if RESUME_FILE in found.files else {}
    return ModelState(tensors, of_extra(beside), found.state.get(BUFFERS, {}))

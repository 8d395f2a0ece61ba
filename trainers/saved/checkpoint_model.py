"""The model of a checkpoint, as the run validated it: with the average of its weights, if it keeps one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.run.checkpoint import load_tensors, stream_checkpoint
from orchestray.platform.run.checkpoint_files import MODEL_FILE, OPTIMIZER_FILE
from orchestray.trainers.optim.averaged import AVERAGE

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.run.checkpoint_files import Found

HAS_AVERAGE = "has_average"
"""Key of a checkpoint's state: True if the optimizer's tensors have an average of the weights."""


def load_model(found: Found) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's model by name, on the CPU.

    Raises:
        CheckpointError: the checkpoint is damaged.
        StorageError: the checkpoint cannot be read.
    """
    model = load_tensors(found, MODEL_FILE)
    if found.state.get(HAS_AVERAGE):
        described, tensors = stream_checkpoint(found, OPTIMIZER_FILE)
        for (key, *_), tensor in zip(described, tensors, strict=True):
            name, _, slot = key.rpartition(".")
            if slot == AVERAGE and name in model:
                model[name] = tensor
    return model

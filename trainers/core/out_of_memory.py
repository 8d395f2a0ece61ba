"""Sentences for steps that the memory of their device does not hold, with the settings that take less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from orchestray.platform.errors import TrainingError

ADVICE = (
    "A step takes less memory with train.accumulate, which computes a batch in parts, with train.recompute, or with a "
    "smaller train.batch_size; strategy.exchange.shard and strategy.network divide the model over the workers."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of one of torch's allocators, of a GPU or of the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def told_if_out_of_memory(device: torch.device) -> Iterator[None]:
    """Turn an error for want of memory into a sentence that says what takes less.

    Raises:
        TrainingError: the memory of the device did not hold what the block did.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TrainingError(f"The memory of {device} does not hold this training: {reason}. {ADVICE}") from error

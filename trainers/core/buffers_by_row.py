"""Buffers of which each sample changes rows of its own: the states of streams, a memory bank by sample.

A module names them in an attribute `buffers_by_row`. After a step, each row is that of the replica whose samples have
changed it, which is what one process would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective


def is_by_row(module: nn.Module, name: str) -> bool:
    """Return True if a module says that samples change rows of their own of its buffer `name`."""
    return name in getattr(module, "buffers_by_row", ())


def refuse_by_row(model: nn.Module, what: str) -> None:
    """Refuse a model with such buffers.

    Args:
        model: the model.
        what: key and value of the config under which rows would be averaged.

    Raises:
        ConfigError: it has some.
    """
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_by_row(module, name):
                full = f"{path}.{name}" if path else name
                raise ConfigError(
                    f"config: {what} takes means of buffers, and each row of {full!r} belongs to the samples that "
                    "changed it; use strategy.exchange.type: allreduce"
                )


@torch.no_grad()
def agree_by_row(name: str, buffer: Tensor, before: Tensor | None, replicas: Collective, *, is_empty: bool) -> None:
    """Give each row the value of the replica that has changed it, in place. All replicas call.

    Args:
        name: name of the buffer, for messages.
        buffer: the buffer [rows, ...].
        before: what it was before the step.
        replicas: the replicas.
        is_empty: True if this replica had no samples: what its pass has changed does not count.

    Raises:
        TrainingError: several replicas have changed a row, or the buffer has another shape.
    """
    if before is None or before.shape != buffer.shape or not buffer.dim():
        raise TrainingError(
            f"The buffer {name!r} is agreed on row by row (buffers_by_row), and the step has registered it or given it "
            "another shape. Give it its full size in build_model."
        )
    rows = buffer.reshape(len(buffer), -1)
    is_changed = torch.zeros_like(rows[:, 0], dtype=torch.bool)
    if not is_empty:
        is_changed = (rows != before.reshape(len(buffer), -1)).any(dim=1)
    # Sums of one value and zeros are exact.
    values = torch.where(is_changed[:, None], rows, 0).to(torch.float64 if rows.is_floating_point() else torch.int64)
    counts = is_changed.to(torch.int64)
    replicas.all_reduce(counts)
    replicas.all_reduce(values)
    if int(counts.max()) > 1:
        raise TrainingError(
            f"The rows of the buffer {name!r} belong to samples of their own (buffers_by_row), and row "
            f"{int(counts.argmax())} was changed by the samples of several replicas in one step. No two samples of a "
            "batch may change the same row."
        )
    kept = before.reshape(len(buffer), -1)
    buffer.copy_(torch.where(counts[:, None] > 0, values.to(buffer.dtype), kept).reshape(buffer.shape))

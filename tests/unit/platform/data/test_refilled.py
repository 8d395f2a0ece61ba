"""Batches that a later one would overwrite are refused, whatever way they share their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TrainingError

ToBatch = Callable[[pa.Table], dict[str, Any]]


def numbers(to_batch: ToBatch, num_rows: int = 34) -> list[float]:
    table = pa.table({"x": np.arange(float(num_rows))})
    stream = SampleStream(open_source(table), to_batch, batch_size=4, shuffle=False)
    with stream.epoch(0) as shares:
        return [number for share in shares for number in share.micro_batches[0].batch["inputs"].tolist()]


def in_turns(*buffers: Any) -> ToBatch:
    """Return a `to_batch` that fills buffers in turns, and returns the part of each that it has filled."""
    turns = [0]

    def to_batch(columns: pa.Table) -> dict[str, Any]:
        buffer = buffers[turns[0] % len(buffers)][: columns.num_rows]
        turns[0] += 1
        buffer[:] = to_tensor(columns["x"])
        return {"inputs": buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)}

    return to_batch


@pytest.mark.parametrize(
    "to_batch",
    [
        in_turns(torch.zeros(4, dtype=torch.float64)),
        in_turns(np.zeros(4)),
        in_turns(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)),
    ],
    ids=["a tensor", "an array", "two in turns"],
)
def test_a_buffer_that_is_filled_again_is_refused(to_batch: ToBatch) -> None:
    with pytest.raises(TrainingError, match=r"fills the memory of an earlier batch again.* Return new tensors"):
        numbers(to_batch)


def test_what_all_batches_share_and_none_changes_is_taken_with_its_nans() -> None:
    same = torch.tensor([1.0, float("nan")])
    assert numbers(lambda columns: {"inputs": to_tensor(columns["x"]), "same": same}) == [*range(34)]

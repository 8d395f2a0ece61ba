"""Shares of a worker, read at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from torch import Tensor

from orchestray.platform.data.order import share_pieces
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import Share
from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.variants.hogwild.reading import read_together

SAMPLES, BATCH = 50, 12


def to_batch(columns: pa.Table) -> dict[str, Tensor]:
    return {"inputs": to_tensor(columns["number"])}


def orders(accumulate: int) -> list[Compute]:
    """Return every share of two epochs of two workers, in order."""
    found = []
    for epoch in range(2):
        for step, first in enumerate(range(0, SAMPLES, BATCH)):
            samples = min(BATCH, SAMPLES - first)
            for share in range(2):
                pieces = share_pieces(first, samples, accumulate=accumulate, num_shares=2, share=share)
                if not pieces:
                    continue  # nobody is ordered to compute nothing
                size, parts = sum(stop - start for start, stop in pieces), min(accumulate, samples)
                number = len(found)
                found.append(Compute(number, step + 1, epoch, step, share, 2, tuple(pieces), samples, size, parts, 0))
    return found


def told(share: Share) -> list[object]:
    parts = [
        (part.sample_ids.tolist(), part.num_samples, part.batch["inputs"].tolist()) for part in share.micro_batches
    ]
    return [share.step_in_epoch, share.batch_samples, share.num_micro_batches, parts]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("chosen", [slice(None), slice(3, 16, 2), slice(None, None, -1)], ids=str)
def test_shares_read_together_are_those_read_alone(accumulate: int, chosen: slice) -> None:
    source = open_source(pa.table({"number": np.arange(SAMPLES, dtype=np.float32)}))
    wanted = orders(accumulate)[chosen]
    with ShareReader(source, to_batch, seed=3) as alone, ShareReader(source, to_batch, seed=3) as reader:
        found = read_together(reader, wanted)
        assert [told(share) for share in found] == [told(alone.read(order)) for order in wanted]


def test_neighbours_are_looked_up_once() -> None:
    source = open_source(pa.table({"number": np.arange(SAMPLES, dtype=np.float32)}))
    looked: list[int] = []

    class Counting(ShareReader):
        def read(self, order: object) -> Share:
            looked.append(1)
            return super().read(order)  # type: ignore[arg-type]

    with Counting(source, to_batch) as reader:
        shares = read_together(reader, orders(1)[:10])
    assert len(looked) == 1
    assert sum(part.num_samples for share in shares for part in share.micro_batches) == SAMPLES

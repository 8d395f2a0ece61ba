"""Rows that are used in their order."""

from __future__ import annotations

import pyarrow as pa
import pytest

from orchestray.platform.data.in_order import InOrder
from orchestray.platform.data.mix import Mix
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.data.window_cache import taker_of
from orchestray.platform.errors import DataError, TaskError

TABLE = pa.table({"x": list(range(11))})


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_epoch_uses_the_rows_in_the_order_of_the_table(num_replicas: int, seed: int) -> None:
    source = open_source(InOrder(TABLE))
    for epoch in (0, 1, 7):
        seen = []
        streams = [
            SampleStream(
                source,
                lambda rows: {"x": to_tensor(rows["x"])},
                batch_size=4,
                rank=rank,
                num_replicas=num_replicas,
                seed=seed,
            )
            for rank in range(num_replicas)
        ]
        opened = [stream.epoch(epoch) for stream in streams]
        for shares in zip(*opened, strict=True):
            seen += [int(x) for share in shares for part in share.micro_batches for x in part.batch["x"]]
            assert all(list(part.sample_ids) == part.batch["x"].tolist() for s in shares for part in s.micro_batches)
        for each in opened:
            each.__exit__(None, None, None)
        assert seen == list(range(11))


def test_rows_by_position_are_in_order_too() -> None:
    taker = taker_of(open_source(InOrder(TABLE)), seed=3)
    rows, ids = taker.take(4, 2, 6)
    taker.close()
    assert rows["x"].to_pylist() == list(ids) == [2, 3, 4, 5]


def test_what_is_no_table_an_empty_one_and_one_in_a_mix_are_refused() -> None:
    with pytest.raises(TaskError, match=r"InOrder takes a pyarrow\.Table, got a list"):
        open_source(InOrder([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is empty"):
        open_source(InOrder(TABLE.slice(0, 0)), split="train")
    with pytest.raises(TaskError, match="part 1 is a InOrder"):
        open_source(Mix([InOrder(TABLE)], [1.0]))  # type: ignore[list-item]

"""The stream of one replica: its exact share of every batch, in bounded memory, from any step on."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.data.order import window_order
from orchestray.platform.data.source import Source, open_source
from orchestray.platform.data.stream import SampleStream, Share
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError
from support.accounting import Accounting, WriteParquet, numbered


def to_batch(columns: pa.Table) -> dict[str, Tensor]:
    return {"inputs": to_tensor(columns["vector"]), "number": to_tensor(columns["number"])}


def stream(source: Source, **options: Any) -> SampleStream:
    return SampleStream(source, to_batch, **{"batch_size": 8, **options})


def shares_of(stream: SampleStream, epoch: int = 0, start_step: int = 0) -> list[Share]:
    with stream.epoch(epoch, start_step) as shares:
        return list(shares)


def used(share: Share) -> list[int]:
    """Return the samples of a share, by the numbers in their own columns."""
    return [int(number) for micro_batch in share.micro_batches for number in micro_batch.batch["number"]]


def background_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("prefetch", "read-ahead"))]


def together(source: Source, num_replicas: int, epoch: int, start_step: int = 0, **options: Any) -> list[list[int]]:
    """Return each batch of an epoch, from the replicas' parts of its micro-batches, by rank."""
    replicas = [
        shares_of(stream(source, rank=rank, num_replicas=num_replicas, **options), epoch, start_step)
        for rank in range(num_replicas)
    ]
    return [
        [
            int(number)
            for index in range(shares[0].num_micro_batches)
            for share in shares
            for micro_batch in share.micro_batches[index : index + 1]
            for number in micro_batch.batch["number"]
        ]
        for shares in zip(*replicas, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    num_replicas=st.integers(1, 5),
    accumulate=st.integers(1, 4),
)
def test_batches_are_the_global_order_cut_up_whatever_the_number_of_replicas(
    num_samples: int, batch_size: int, num_replicas: int, accumulate: int
) -> None:
    source = open_source(numbered(0, num_samples))
    order = window_order([num_samples], seed=5, epoch=2).tolist()
    batches = together(source, num_replicas, 2, batch_size=batch_size, accumulate=accumulate, seed=5)
    assert batches == [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]


@pytest.mark.parametrize("start_step", [0, 6, 7])
def test_the_last_share_of_an_epoch_is_prepared_without_a_thread_and_is_the_same(start_step: int) -> None:
    threads: list[str] = []

    def noted(columns: pa.Table) -> dict[str, Tensor]:
        threads.append(threading.current_thread().name)
        return to_batch(columns)

    whole = SampleStream(open_source(numbered(0, 60)), noted, batch_size=8, seed=5)
    with whole.epoch(1, start_step) as items:
        shares = list(items)
    own = threading.current_thread().name
    assert {name == own for name in threads} == {start_step == whole.steps_per_epoch - 1}
    assert [used(share) for share in shares] == [used(share) for share in shares_of(whole, 1)[start_step:]]


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 60), batch_size=st.integers(1, 70), accumulate=st.integers(1, 5), rank=st.integers(0, 2)
)
def test_shares_and_micro_batches_say_truly_what_they_hold(
    num_samples: int, batch_size: int, accumulate: int, rank: int
) -> None:
    replica = stream(
        open_source(numbered(0, num_samples)), batch_size=batch_size, accumulate=accumulate, rank=rank, num_replicas=3
    )
    shares = shares_of(replica)
    assert [share.step_in_epoch for share in shares] == list(range(replica.steps_per_epoch))
    for share in shares:
        assert share.batch_samples == min(batch_size, num_samples - share.step_in_epoch * batch_size)
        assert share.num_micro_batches == min(accumulate, share.batch_samples)
        whole = [stop - start for start, stop in split_evenly(share.batch_samples, accumulate)]
        parts = [split_evenly(size, 3)[rank] for size in whole]
        sizes = [micro_batch.num_samples for micro_batch in share.micro_batches]
        assert sizes == [stop - start for start, stop in parts if start < stop]
        for micro_batch in share.micro_batches:
            assert micro_batch.batch["number"].tolist() == micro_batch.sample_ids.tolist()
            assert micro_batch.batch["inputs"].shape == (micro_batch.num_samples, 3)
            assert (micro_batch.batch["inputs"] == micro_batch.batch["number"].unsqueeze(1)).all()


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("window_rows", [1, 20, 64])
def test_a_streamed_dataset_uses_each_row_once_an_epoch(
    write_parquet: WriteParquet, batch_size: int, window_rows: int
) -> None:
    source = open_source(write_parquet(50, 33, 1, 60, row_group_rows=17), window_rows=window_rows)
    epochs = [together(source, 3, epoch, batch_size=batch_size, accumulate=2) for epoch in (0, 1)]
    for batches in epochs:
        assert sorted(number for batch in batches for number in batch) == list(range(144))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert epochs[0] != epochs[1]
    assert together(source, 1, 1, batch_size=batch_size) == epochs[1]


@pytest.mark.parametrize("window_rows", [20, 1000])
def test_without_shuffling_rows_come_in_the_dataset_s_order(write_parquet: WriteParquet, window_rows: int) -> None:
    source = open_source(write_parquet(50, 33, row_group_rows=17), window_rows=window_rows)
    batches = together(source, 2, 4, shuffle=False)
    assert [number for batch in batches for number in batch] == list(range(83))


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("window_rows", [20, 1000])
def test_resuming_gives_the_rest_of_the_epoch(write_parquet: WriteParquet, window_rows: int, num_replicas: int) -> None:
    source = open_source(write_parquet(50, 33, row_group_rows=17), window_rows=window_rows)
    whole = together(source, num_replicas, 3)
    for start_step in range(len(whole) + 1):
        assert together(source, num_replicas, 3, start_step) == whole[start_step:]


def test_no_more_than_two_windows_are_in_memory(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(200, 200, row_group_rows=10), window_rows=25))
    numbers = []
    with stream(source).epoch(0) as shares:
        for share in shares:
            numbers += used(share)
    assert sorted(numbers) == list(range(400))
    assert len(source.reads) == 14
    assert source.most_rows_alive <= 60  # windows have 30 rows: three row groups of ten
    assert source.rows_alive == 0


def test_a_batch_of_many_windows_holds_no_more_of_them(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(400, row_group_rows=10), window_rows=10))
    assert [len(batch) for batch in together(source, 1, 0, batch_size=150)] == [150, 150, 100]
    assert source.most_rows_alive <= 20  # fewer where the thread that reads ahead comes to it late


def test_a_replica_reads_no_window_that_its_shares_do_not_need(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(400, row_group_rows=10)
    read = []
    for rank in range(4):
        source = Accounting(open_source(dataset, window_rows=10))
        shares_of(stream(source, batch_size=400, rank=rank, num_replicas=4))
        read.append({chunk for chunks in source.reads for chunk in chunks})
        assert len(source.reads) == 10
    assert set().union(*read) == set(range(40))


def test_resuming_reads_no_earlier_window(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(200, row_group_rows=10)
    whole, resumed = (Accounting(open_source(dataset, window_rows=20)) for _ in range(2))
    batches = [used(share) for share in shares_of(stream(whole), 6)]
    assert [used(share) for share in shares_of(stream(resumed), 6, start_step=16)] == batches[16:]
    assert resumed.reads == whole.reads[6:]  # sixteen batches of eight: windows of twenty rows up to the 120th are done


def test_a_window_is_read_only_when_it_is_near(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(400, row_group_rows=10), window_rows=10))
    with stream(source, prefetch=2, batch_size=10).epoch(0) as shares:
        for taken in range(1, 20):
            next(shares)
            # Those taken, two ready, one in hand, and the window after it.
            assert len(source.reads) <= taken + 4


def test_batches_can_be_written_into_without_a_trace_in_the_data() -> None:
    source = open_source(numbered(0, 16))
    for shuffle in (True, False):
        for share in shares_of(stream(source, shuffle=shuffle)):
            share.micro_batches[0].batch["inputs"].zero_()
    ((whole,), _) = (share.micro_batches for share in shares_of(stream(source, shuffle=False)))
    assert whole.batch["inputs"][:, 0].tolist() == list(range(8))


def test_micro_batches_share_the_memory_of_the_share() -> None:
    (share,) = shares_of(stream(open_source(numbered(0, 8)), accumulate=2))
    first, second = (micro_batch.batch["inputs"] for micro_batch in share.micro_batches)
    assert second.data_ptr() == first.data_ptr() + first.numel() * first.element_size()


def test_to_batch_gets_a_table_with_the_dataset_s_columns(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(20, row_group_rows=5)
    seen: list[pa.Table] = []

    def keep(columns: pa.Table) -> dict[str, Tensor]:
        seen.append(columns)
        return to_batch(columns)

    for window_rows in (5, 100):
        shares_of(SampleStream(open_source(dataset, window_rows=window_rows), keep, batch_size=7))
    assert all(type(table) is pa.Table and table.schema == dataset.schema for table in seen)
    assert all(column.num_chunks == 1 for table in seen for column in table.columns)


@pytest.mark.parametrize("window_rows", [5, 100])
def test_a_batch_of_one_sample_is_that_of_the_first_row_and_belongs_to_the_caller(
    write_parquet: WriteParquet, window_rows: int
) -> None:
    source = Accounting(open_source(write_parquet(20, row_group_rows=5), window_rows=window_rows))
    samples = stream(source)
    first = samples.one_sample()
    assert {name: (tuple(t.shape), t.dtype) for name, t in first.items()} == {
        "inputs": ((1, 3), torch.float32),
        "number": ((1,), torch.int64),
    }
    wanted = first["inputs"].clone()
    first["inputs"].zero_()
    assert torch.equal(samples.one_sample()["inputs"], wanted)
    assert first["number"].tolist() == [0]
    assert source.reads == []


@pytest.mark.parametrize(("num_replicas", "accumulate"), [(1, 1), (3, 2)])
def test_without_the_last_short_batch_the_others_stay_the_same(num_replicas: int, accumulate: int) -> None:
    source, options = open_source(numbered(0, 21)), {"accumulate": accumulate}
    for epoch in (0, 1):
        every = together(source, num_replicas, epoch, **options)
        kept = together(source, num_replicas, epoch, drop_last=True, **options)
        assert [len(batch) for batch in every] == [8, 8, 5]
        assert kept == every[:2]
        assert together(source, num_replicas, epoch, 1, drop_last=True, **options) == every[1:2]
    whole = stream(source, drop_last=True)
    assert (whole.num_samples, whole.steps_per_epoch) == (16, 2)
    assert stream(open_source(numbered(0, 16)), drop_last=True).num_samples == 16


def test_data_of_less_than_a_batch_are_refused_where_short_batches_are_dropped() -> None:
    with pytest.raises(DataError, match=r"has 7 samples, fewer than one batch of 8.*train\.drop_last"):
        stream(open_source(numbered(0, 7)), drop_last=True)


# -- errors, and leaving early -----------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def test_what_to_batch_raises_reaches_the_consumer_as_it_is() -> None:
    def fail_later(columns: pa.Table) -> dict[str, Tensor]:
        if 11 in columns["number"].to_pylist():
            raise BrokenError("eleven")
        return to_batch(columns)

    replica = SampleStream(open_source(numbered(0, 20)), fail_later, batch_size=5, shuffle=False)
    seen: list[int] = []
    with pytest.raises(BrokenError, match="eleven") as caught, replica.epoch(0) as shares:
        seen.extend(share.step_in_epoch for share in shares)
    assert seen == [0, 1]  # the rows from 10 to 14 fail
    assert "fail_later" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert background_threads() == []


def test_a_column_that_is_no_tensor_is_named() -> None:
    def careless(columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["text"])}

    replica = SampleStream(open_source(numbered(0, 9)), careless, batch_size=4)
    with pytest.raises(DataError, match="column 'text' of type string cannot become a tensor"):
        shares_of(replica)


def test_a_file_truncated_after_the_start_is_named_by_the_iteration(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(40, 40, row_group_rows=10)
    source = open_source(dataset, window_rows=10)
    victim = Path(dataset.files[1])
    victim.write_bytes(victim.read_bytes()[:50])
    with pytest.raises(DataError, match=f"cannot read {victim}"):
        shares_of(stream(source, shuffle=False))
    assert background_threads() == []


@pytest.mark.parametrize("fail_at_read", [0, 1, 5])
def test_an_error_of_reading_ahead_comes_when_its_window_is_due(write_parquet: WriteParquet, fail_at_read: int) -> None:
    source = Accounting(open_source(write_parquet(80, row_group_rows=10), window_rows=10))
    source.fail_at_read = fail_at_read
    seen: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"), stream(source, batch_size=10).epoch(0) as shares:
        seen.extend(share.step_in_epoch for share in shares)
    assert seen == list(range(fail_at_read))
    assert background_threads() == []


def consume_nothing(shares: Any) -> None:
    pass


def consume_one(shares: Any) -> None:
    next(shares)


def consume_and_fail(shares: Any) -> None:
    next(shares)
    raise BrokenError


@pytest.mark.parametrize("consume", [consume_nothing, consume_one, consume_and_fail])
def test_leaving_an_epoch_early_leaves_no_thread_and_no_rows(
    write_parquet: WriteParquet, consume: Callable[[Any], None]
) -> None:
    source = Accounting(open_source(write_parquet(200, row_group_rows=10), window_rows=20))
    try:
        with stream(source).epoch(0) as shares:
            consume(shares)
    except BrokenError:
        pass
    assert background_threads() == []
    assert source.rows_alive == 0
    assert len(source.reads) < 10


def test_nan_in_the_data_passes() -> None:
    table = pa.table({"x": [1.0, float("nan"), 3.0]})
    replica = SampleStream(open_source(table), lambda t: {"inputs": to_tensor(t["x"])}, batch_size=3, shuffle=False)
    (share,) = shares_of(replica)
    assert torch.isnan(share.micro_batches[0].batch["inputs"]).tolist() == [False, True, False]


@pytest.mark.parametrize("start_step", [-1, 4])
def test_a_start_beyond_the_epoch_is_refused(start_step: int) -> None:
    with pytest.raises(ValueError, match="start_step must be from 0 to 3, got"):
        stream(open_source(numbered(0, 20))).epoch(0, start_step)


def first_cut(source: Source, epoch: int = 0, start_step: int = 0, **options: Any) -> tuple[list[int], list[list[int]]]:
    """Return the samples of the first share's cut, whole and in parts; later shares have none."""
    with stream(source, shuffle=False, **options).epoch(epoch, start_step, cuts_first=True) as shares:
        first, *later = shares
    assert not any(share.cut for share in later)
    if first.cut is None:
        return [], []
    whole = first.cut.whole or first.micro_batches[0]
    return whole.batch["number"].tolist(), [part.batch["number"].tolist() for part in first.cut.parts]


def test_the_first_share_is_cut_after_an_odd_number_of_samples_from_any_step_on() -> None:
    source = open_source(numbered(0, 40))
    assert first_cut(source) == ([*range(8)], [[*range(5)], [*range(5, 8)]])
    assert first_cut(source, epoch=1, start_step=2) == ([*range(16, 24)], [[*range(16, 21)], [*range(21, 24)]])
    assert first_cut(source, rank=1, num_replicas=2, accumulate=2) == ([2, 3], [[2], [3]])
    assert not any(share.cut for share in shares_of(stream(source)))


def test_a_share_of_single_samples_is_cut_with_those_of_others_on_one_replica() -> None:
    source = open_source(numbered(0, 40))
    cut = {"batch_size": 10, "accumulate": 5, "num_replicas": 2}
    assert first_cut(source, start_step=1, rank=0, **cut) == ([*range(10, 18)], [[n] for n in range(10, 18)])
    assert first_cut(source, start_step=1, rank=1, **cut) == ([], [])
    assert first_cut(source, batch_size=1) == ([], [])


def test_a_share_that_spans_windows_is_cut_in_the_first_of_them(write_parquet: WriteParquet) -> None:
    source = open_source(write_parquet(40, row_group_rows=10), window_rows=10)
    assert first_cut(source, start_step=1) == ([8, 9], [[8], [9]])
    assert shares_of(stream(source, shuffle=False), start_step=1)[0].num_samples == 8


def test_every_tensor_of_a_batch_is_pinned_by_the_thread_that_reads() -> None:
    threads: list[str] = []

    def pin(tensor: Tensor) -> Tensor:
        threads.append(threading.current_thread().name)
        return tensor + 1

    source = open_source(numbered(0, 40))
    plain, pinned = (shares_of(stream(source, accumulate=2, **more)) for more in ({}, {"pin": pin}))
    for before, after in zip(plain, pinned, strict=True):
        for one, other in zip(before.micro_batches, after.micro_batches, strict=True):
            assert all(torch.equal(one.batch[name] + 1, other.batch[name]) for name in ("inputs", "number"))
    assert threads == ["prefetch"] * (5 * 2 * 2)

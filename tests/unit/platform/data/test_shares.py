"""Shares read by order: the same bits as the stream's, in any order, in bounded memory."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from orchestray.platform.data.order import share_pieces
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import Source, open_source
from orchestray.platform.data.stream import SampleStream, Share
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError
from support.accounting import Accounting, Wanted, WriteParquet, numbered


def to_batch(columns: pa.Table) -> dict[str, Tensor]:
    return {"inputs": to_tensor(columns["vector"]), "number": to_tensor(columns["number"])}


def orders(
    num_samples: int, *, epochs: int = 1, batch_size: int = 8, num_shares: int = 1, accumulate: int = 1
) -> list[tuple[Wanted, int]]:
    """Return all shares that are not empty, each with its index in the batch."""
    found = []
    for epoch in range(epochs):
        for step, first in enumerate(range(0, num_samples, batch_size)):
            samples = min(batch_size, num_samples - first)
            for share in range(num_shares):
                pieces = share_pieces(first, samples, accumulate=accumulate, num_shares=num_shares, share=share)
                if pieces:
                    found.append((Wanted(epoch, step, tuple(pieces), samples, min(accumulate, samples)), share))
    return found


def reader(source: Source, **options: Any) -> ShareReader:
    return ShareReader(source, to_batch, **options)


def numbers(share: Share) -> list[int]:
    return [int(number) for micro_batch in share.micro_batches for number in micro_batch.batch["number"]]


def same(mine: Share, other: Share) -> bool:
    assert (mine.step_in_epoch, mine.batch_samples) == (other.step_in_epoch, other.batch_samples)
    assert mine.num_micro_batches == other.num_micro_batches
    assert len(mine.micro_batches) == len(other.micro_batches)
    return all(
        a.num_samples == b.num_samples
        and a.sample_ids.tolist() == b.sample_ids.tolist()
        and a.batch.keys() == b.batch.keys()
        and all(torch.equal(a.batch[name], b.batch[name]) for name in a.batch)
        for a, b in zip(mine.micro_batches, other.micro_batches, strict=True)
    )


def background_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("prepare-shares", "read-ahead"))]


@pytest.mark.parametrize("window_rows", [20, 1000])
@pytest.mark.parametrize(("num_shares", "accumulate"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_a_share_is_the_stream_s_in_whatever_order_it_is_asked_for(
    write_parquet: WriteParquet, window_rows: int, num_shares: int, accumulate: int
) -> None:
    source = open_source(write_parquet(50, 33, row_group_rows=17), window_rows=window_rows)
    cut: dict[str, Any] = {"batch_size": 9, "accumulate": accumulate}
    expected: dict[tuple[int, int, int], Share] = {}
    for rank in range(num_shares):
        stream = SampleStream(source, to_batch, rank=rank, num_replicas=num_shares, seed=5, **cut)
        for epoch in range(2):
            with stream.epoch(epoch) as shares:
                expected |= {(epoch, share.step_in_epoch, rank): share for share in shares}
    wanted = orders(83, epochs=2, num_shares=num_shares, **cut)
    random.Random(1).shuffle(wanted)
    with reader(source, seed=5) as shares:
        for index, (order, rank) in enumerate(wanted):
            if index % 3 == 0 and index + 1 < len(wanted):
                shares.prepare(wanted[index + 1][0])
            assert same(shares.read(order), expected[order.epoch, order.step_in_epoch, rank])


@pytest.mark.parametrize("window_rows", [20, 1000])
def test_without_shuffling_rows_come_in_the_dataset_s_order(write_parquet: WriteParquet, window_rows: int) -> None:
    source = open_source(write_parquet(50, 33, row_group_rows=17), window_rows=window_rows)
    with reader(source, shuffle=False) as shares:
        assert [n for order, _ in orders(83, num_shares=2) for n in numbers(shares.read(order))] == list(range(83))


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("prepares", [False, True])
def test_no_more_than_two_windows_are_in_memory_and_each_is_read_once(
    write_parquet: WriteParquet, read_ahead: bool, prepares: bool
) -> None:
    source = Accounting(open_source(write_parquet(200, 200, row_group_rows=10), window_rows=25))
    wanted = [order for order, _ in orders(400, epochs=2)]
    with reader(source, read_ahead=read_ahead) as shares:
        for epoch in range(2):
            found = []
            for order, after in zip(wanted, [*wanted[1:], None], strict=True):
                if order.epoch != epoch:
                    continue
                if prepares and after is not None:
                    shares.prepare(after)
                found += numbers(shares.read(order))
            assert sorted(found) == list(range(400))
    assert len(source.reads) == 28
    assert source.most_rows_alive <= 60  # windows have 30 rows: three row groups of ten
    assert source.rows_alive == 0


def test_a_batch_of_many_windows_holds_no_more_of_them(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(400, row_group_rows=10), window_rows=10))
    with reader(source) as shares:
        assert [len(numbers(shares.read(order))) for order, _ in orders(400, batch_size=150)] == [150, 150, 100]
    assert source.most_rows_alive <= 20


def test_a_share_that_lies_behind_costs_no_more_than_its_window(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(100, row_group_rows=10), window_rows=10))
    wanted = [order for order, _ in orders(100, batch_size=10)]
    with reader(source, shuffle=False) as shares:
        for order in wanted[:6]:
            shares.read(order)
        assert numbers(shares.read(wanted[1])) == list(range(10, 20))
        assert source.reads.count((1,)) == 2
        assert numbers(shares.read(wanted[5])) == list(range(50, 60))
        assert source.reads.count((5,)) == 1  # it was kept
    assert source.most_rows_alive <= 20


def test_a_table_in_memory_needs_no_thread_unless_a_share_is_prepared() -> None:
    first, second = (order for order, _ in orders(16))
    with reader(open_source(numbered(0, 16))) as shares:
        shares.read(first)
        assert background_threads() == []
        shares.prepare(second)
        assert len(background_threads()) == 1
        assert len(numbers(shares.read(second))) == 8
    assert background_threads() == []


def test_a_prepared_share_is_made_beside_the_consumer_and_once() -> None:
    made: list[tuple[str, int]] = []

    def noting(columns: pa.Table) -> dict[str, Tensor]:
        made.append((threading.current_thread().name.partition("_")[0], columns.num_rows))
        return to_batch(columns)

    (order, _), *_ = orders(16)
    with ShareReader(open_source(numbered(0, 16)), noting) as shares:
        shares.prepare(order)
        shares.prepare(order)
        prepared = shares.read(order)
        assert made == [("prepare-shares", 8)]
        again = shares.read(order)  # a copy, or a share that came back
        assert len(made) == 2
        assert same(prepared, again)


def test_prepared_shares_that_nobody_asks_for_do_not_pile_up() -> None:
    wanted = [order for order, _ in orders(200, batch_size=10)]
    with reader(open_source(numbered(0, 200)), shuffle=False) as shares:
        for order in wanted:
            shares.prepare(order)
        assert len(shares._prepared) == 4
        assert numbers(shares.read(wanted[0])) == list(range(10))
        assert numbers(shares.read(wanted[-1])) == list(range(190, 200))


# -- errors, and leaving -----------------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("prepares", [False, True])
def test_what_to_batch_raises_comes_to_who_reads_the_share(prepares: bool) -> None:
    def fail_later(columns: pa.Table) -> dict[str, Tensor]:
        if 11 in columns["number"].to_pylist():
            raise BrokenError("eleven")
        return to_batch(columns)

    wanted = [order for order, _ in orders(20, batch_size=5)]
    with ShareReader(open_source(numbered(0, 20)), fail_later, shuffle=False) as shares:
        if prepares:
            shares.prepare(wanted[2])
        assert numbers(shares.read(wanted[3])) == [15, 16, 17, 18, 19]
        with pytest.raises(BrokenError, match="eleven"):
            shares.read(wanted[2])
    assert background_threads() == []


def test_a_column_that_is_no_tensor_is_named() -> None:
    def careless(columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["text"])}

    with (
        ShareReader(open_source(numbered(0, 9)), careless) as shares,
        pytest.raises(DataError, match="column 'text' of type string cannot become a tensor"),
    ):
        shares.read(orders(9)[0][0])


def test_a_window_that_could_not_be_read_is_tried_again_when_it_is_asked_for_again(
    write_parquet: WriteParquet,
) -> None:
    source = Accounting(open_source(write_parquet(30, row_group_rows=10), window_rows=10))
    source.fail_at_read = 1
    first, second, _ = (order for order, _ in orders(30, batch_size=10))
    with reader(source, shuffle=False) as shares:
        assert numbers(shares.read(first)) == list(range(10))
        with pytest.raises(OSError, match="the disk is gone"):
            shares.read(second)
        source.fail_at_read = -1
        assert numbers(shares.read(second)) == list(range(10, 20))


def test_a_file_truncated_after_the_start_is_named(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(40, 40, row_group_rows=10)
    source = open_source(dataset, window_rows=10)
    victim = Path(dataset.files[1])
    victim.write_bytes(victim.read_bytes()[:50])
    with reader(source, shuffle=False) as shares:
        wanted = [order for order, _ in orders(80, batch_size=10)]
        assert numbers(shares.read(wanted[0])) == list(range(10))
        with pytest.raises(DataError, match=f"cannot read {victim}"):
            shares.read(wanted[6])


def test_leaving_ends_the_threads_and_lets_go_of_the_rows(write_parquet: WriteParquet) -> None:
    source = Accounting(open_source(write_parquet(200, row_group_rows=10), window_rows=20))
    wanted = [order for order, _ in orders(200)]
    with reader(source) as shares:
        shares.read(wanted[0])
        for order in wanted[1:4]:
            shares.prepare(order)
    assert background_threads() == []
    assert source.rows_alive == 0
    assert len(source.reads) < 5
    with pytest.raises(ValueError, match="the reader is closed"):
        shares.read(wanted[0])


@pytest.mark.parametrize("step", [0, 2])
def test_the_first_share_of_a_reader_is_cut_if_that_is_asked_for(step: int) -> None:
    wanted = [order for order, _ in orders(40)][step:]
    with reader(open_source(numbered(0, 40)), cuts_first=True) as shares:
        first, second = shares.read(wanted[0]), shares.read(wanted[1])
    assert first.cut is not None
    assert first.cut.whole is None
    assert [part.sample_ids.tolist() for part in first.cut.parts] == [
        first.micro_batches[0].sample_ids[:5].tolist(),
        first.micro_batches[0].sample_ids[5:].tolist(),
    ]
    assert second.cut is None


def test_a_share_of_single_samples_is_cut_with_others_of_the_first_batch() -> None:
    wanted = [order for order, _ in orders(24, num_shares=2, batch_size=6, accumulate=3)]
    with reader(open_source(numbered(0, 24)), shuffle=False, cuts_first=True) as shares:
        later, first = shares.read(wanted[-1]), shares.read(wanted[1])
    assert later.cut is None  # nobody knows where its batch begins
    assert first.cut is not None
    assert first.cut.whole is not None
    assert first.cut.whole.sample_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert [part.sample_ids.tolist() for part in first.cut.parts] == [[n] for n in range(6)]

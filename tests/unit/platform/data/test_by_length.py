"""Samples of about equal length together: each once an epoch, and alike for any cut, step and reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from orchestray.platform.data.by_length import ByLength
from orchestray.platform.data.mix import Mix
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import Source, Streamed, open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import DataError, TaskError
from support.accounting import Wanted, WriteParquet

LENGTHS = np.random.default_rng(0).integers(0, 50, 300)
KINDS = {
    "text": pa.array(["ö" * length for length in LENGTHS]),
    "list": pa.array([[7] * length for length in LENGTHS]),
    "bytes": pa.array([b"x" * length for length in LENGTHS], pa.large_binary()),
}


def source_of(kind: str = "text", run_rows: int = 64, **given: Any) -> Source:
    return open_source(ByLength(table_of(kind), "sample", run_rows), split="train", **given)


def table_of(kind: str) -> pa.Table:
    return pa.table({"sample": KINDS[kind], "length": LENGTHS, "row": np.arange(len(LENGTHS))})


def epoch_of(source: Source, epoch: int = 0, start_step: int = 0, **cut: Any) -> list[list[tuple[int, int]]]:
    """Return row and length of the samples of each batch."""
    batches: dict[int, list[tuple[int, int]]] = {}
    for rank in range(cut.get("num_replicas", 1)):
        stream = SampleStream(source, lambda rows: {"rows": rows}, rank=rank, **{"batch_size": 8, **cut})
        with stream.epoch(epoch, start_step) as shares:
            for share in shares:
                for part in share.micro_batches:
                    rows = part.batch["rows"]
                    assert rows["row"].to_pylist() == part.sample_ids.tolist()
                    pairs = zip(rows["row"].to_pylist(), rows["length"].to_pylist(), strict=True)
                    batches.setdefault(share.step_in_epoch, []).extend(pairs)
    return [batches[step] for step in sorted(batches)]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_samples_of_about_equal_length_and_an_epoch_has_each_once(kind: str) -> None:
    batches = epoch_of(source_of(kind))
    assert sorted(row for batch in batches for row, _ in batch) == list(range(300))
    padded = sum(max(length for _, length in batch) * len(batch) for batch in batches)
    shuffled = epoch_of(open_source(table_of(kind), split="train"))
    assert padded < 1.25 * LENGTHS.sum()
    assert sum(max(length for _, length in batch) * len(batch) for batch in shuffled) > 1.6 * LENGTHS.sum()
    lengths = [length for batch in batches for _, length in batch]
    assert all(lengths[start : start + 64] == sorted(lengths[start : start + 64])[::-1] for start in range(0, 300, 64))


def test_epochs_differ_and_replicas_micro_batches_and_a_later_start_do_not_matter() -> None:
    first, second = epoch_of(source_of()), epoch_of(source_of(), epoch=1)
    assert first != second
    flat = [sorted(batch) for batch in second]
    assert [sorted(batch) for batch in epoch_of(source_of(), epoch=1, num_replicas=3, accumulate=2)] == flat
    assert epoch_of(source_of(), epoch=1, start_step=20) == second[20:]


def test_data_without_shuffling_keep_their_order() -> None:
    batches = epoch_of(source_of(), shuffle=False)
    assert [row for batch in batches for row, _ in batch] == list(range(300))


def test_a_reader_of_any_share_has_the_same_samples() -> None:
    wanted = epoch_of(source_of(), epoch=1)
    with ShareReader(source_of(), lambda rows: {"rows": rows}, seed=0) as reader:
        for step in (5, 2):
            share = reader.read(Wanted(1, step, ((step * 8, step * 8 + 8),), 8, 1))
            assert share.micro_batches[0].sample_ids.tolist() == [row for row, _ in wanted[step]]


def test_a_stream_of_windows_is_sorted_within_each(write_parquet: WriteParquet) -> None:
    source = open_source(ByLength(Streamed(write_parquet(70, 50, row_group_rows=10), 20), "text", 10), split="train")
    found = []
    stream = SampleStream(source, lambda rows: {"text": rows["text"]}, batch_size=10)
    with stream.epoch(1) as shares:
        for share in shares:
            texts = share.micro_batches[0].batch["text"].to_pylist()
            assert texts == [f"row {row}" for row in share.micro_batches[0].sample_ids]
            assert [len(text) for text in texts] == sorted(map(len, texts))[::-1]
            found += texts
    assert sorted(found) == sorted(f"row {row}" for row in range(120))


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (ByLength(table_of("text"), "word"), DataError, "the data has no column 'word' to sort by; it has sample,"),
        (ByLength(table_of("text"), "row"), DataError, "column 'row' is of type int64, and samples are sorted by the"),
        (ByLength(table_of("text"), "sample", 0), TaskError, r"ByLength\(run_rows=0\) sorts nothing"),
        (ByLength(Mix([table_of("text")], [1]), "sample"), TaskError, "takes a table or a dataset; its data is a Mix"),  # type: ignore[arg-type]
        (Mix([ByLength(table_of("text"), "sample")], [1]), TaskError, "datasets; part 1 is a ByLength"),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_sorted_is_refused(data: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        open_source(data, split="train")

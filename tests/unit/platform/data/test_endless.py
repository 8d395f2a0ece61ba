"""Data of unknown length: every worker reads it all, takes its share, and finds any step again."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from orchestray.platform.data import retries
from orchestray.platform.data.endless import Endless
from orchestray.platform.data.retries import READS
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import Source, first_row, open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import ConfigError, DataError, TaskError
from support.accounting import numbered
from support.patience import PATIENCE_S

ROWS = 43
WINDOW = 10


class Feed:
    """Passes of 43 numbered rows in batches of 4, and an account of what is read."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.num_tables = 0
        self.errors: dict[int, BaseException] = {}

    def __call__(self, number: int) -> Iterator[pa.RecordBatch]:
        self.passes.append(number)
        for start in range(0, ROWS, 4):
            self.num_tables += 1
            if (error := self.errors.pop(self.num_tables, None)) is not None:
                raise error
            yield from numbered(number * ROWS + start, number * ROWS + min(start + 4, ROWS)).to_batches()


def source_of(feed: Any, num_rows: int = 120) -> Source:
    return open_source(Endless(feed, window_rows=WINDOW), split="train", num_endless=num_rows)


def numbers(source: Source, start_step: int = 0, **cut: Any) -> list[list[int]]:
    """Return the numbers of each batch, over all replicas in the order of their ranks."""
    batches: dict[int, list[int]] = {}
    for rank in range(cut.get("num_replicas", 1)):
        stream = SampleStream(source, lambda rows: {"n": rows["number"]}, rank=rank, **{"batch_size": 6, **cut})
        with stream.epoch(0, start_step) as shares:
            for share in shares:
                for part in share.micro_batches:
                    batches.setdefault(share.step_in_epoch, []).extend(part.batch["n"].to_pylist())
    return [batches[step] for step in sorted(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_passes_follow_each_other_and_every_row_of_one_is_used_once() -> None:
    feed = Feed()
    drawn = flat(numbers(source_of(feed)))
    assert len(drawn) == 120
    assert sorted(drawn[:ROWS]) == list(range(ROWS))
    assert sorted(drawn[ROWS : 2 * ROWS]) == list(range(ROWS, 2 * ROWS))
    assert drawn[:ROWS] != sorted(drawn[:ROWS])
    assert [number for number in feed.passes if number] == sorted(number for number in feed.passes if number)


def test_rows_move_within_their_window_only() -> None:
    drawn = flat(numbers(source_of(Feed())))
    assert sorted(drawn[:12]) == list(range(12))  # the first that has ten rows or more, of tables of four


@pytest.mark.parametrize("cut", [{"num_replicas": 3}, {"accumulate": 4}, {"batch_size": 40}, {"prefetch": 5}], ids=str)
def test_the_order_is_the_same_however_batches_are_cut(cut: dict[str, Any]) -> None:
    size = cut.get("batch_size", 6)
    whole = flat(numbers(source_of(Feed())))
    found = numbers(source_of(Feed()), **cut)
    wanted = [whole[start : start + size] for start in range(0, 120, size)]
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in wanted]


@pytest.mark.parametrize("start_step", [1, 7, 19])
def test_a_resumed_run_goes_on_with_the_same_batches(start_step: int) -> None:
    assert numbers(source_of(Feed()), start_step) == numbers(source_of(Feed()))[start_step:]


def test_a_longer_run_begins_with_the_batches_of_the_shorter_one() -> None:
    assert numbers(source_of(Feed(), 240))[:20] == numbers(source_of(Feed(), 120))


def test_shares_on_request_are_the_stream_s_even_those_that_lie_behind() -> None:
    class Order:
        epoch, batch_samples, num_micro_batches = 0, 6, 1

        def __init__(self, step: int) -> None:
            self.step_in_epoch, self.pieces = step, ((6 * step, 6 * step + 6),)

    wanted = numbers(source_of(Feed()))
    with ShareReader(source_of(Feed()), lambda rows: {"n": rows["number"]}) as shares:
        for step in (3, 0, 12, 11, 12, 1):
            assert shares.read(Order(step)).micro_batches[0].batch["n"].to_pylist() == wanted[step]


@pytest.mark.parametrize("fails_at", [2, 5, 12, 13, 17])
def test_an_error_that_passes_loses_and_repeats_no_row(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0))
    READS.begin(None)
    feed = Feed()
    feed.errors[fails_at] = OSError(errno.ESTALE, "Stale file handle")
    assert numbers(source_of(feed)) == numbers(source_of(Feed()))
    assert READS.num_retries == 1


def test_a_run_that_waits_for_the_next_rows_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", (3600.0,))
    waits = threading.Event()
    READS.begin(lambda _: waits.set())
    feed = Feed()
    feed.errors[5] = OSError(errno.ESTALE, "Stale file handle")
    with SampleStream(source_of(feed), lambda rows: {}, batch_size=6).epoch(0):
        assert waits.wait(PATIENCE_S)
    READS.begin(None)


def test_files_need_not_be_counted(tmp_path: Path) -> None:
    for index, rows in enumerate(([1, 2, 3], [4], [5, 6])):
        (tmp_path / f"{index}.csv").write_text("number\n" + "".join(f"{row}\n" for row in rows))
    source = source_of(lambda _: ds.dataset(tmp_path, format="csv").to_batches(), 12)
    drawn = flat(numbers(source))
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_user_s_generator_reaches_the_consumer() -> None:
    feed = Feed()
    feed.errors[9] = ValueError("bad line 33")
    with pytest.raises(ValueError, match="bad line 33"):
        numbers(source_of(feed))


@pytest.mark.parametrize("first_pass", [[], list(numbered(0, 8).to_batches())])
def test_a_pass_without_rows_is_an_error_and_not_an_endless_wait(first_pass: list[Any]) -> None:
    once = iter(first_pass)  # which is used up by the first pass
    with pytest.raises(DataError, match=r"the train data is empty: pass . of its Endless has no rows"):
        numbers(source_of(lambda _: once))


def test_without_steps_and_for_validation_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.epochs: the train data is Endless, .* give train.steps"):
        open_source(Endless(Feed()), split="train")
    with pytest.raises(ConfigError, match="a validation needs an end"):
        open_source(Endless(Feed()), split="validation", num_endless=10)


def test_a_first_row_needs_no_number_of_steps() -> None:
    class Task:
        def dataset(self, split: str) -> Endless:
            return Endless(Feed())

    task: Any = Task()
    assert first_row(task)["number"].to_pylist() == [0]


TABLE = pa.table({"number": [1, 2]})


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (iter([TABLE]), r"Endless\(read\): wanted a function .*, got a list_iterator"),
        (lambda _: TABLE, r"its read\(0\) returned a Table"),
        (lambda _: None, r"its read\(0\) returned a NoneType"),
        (lambda _: [{"number": 1}], r"its read\(0\) gave a dict among them"),
        (lambda _: [TABLE, pa.table({"number": [0.5]})], r"change from number \(int64\) to number \(double\)"),
    ],
)
def test_what_is_no_reading_of_tables_is_refused(read: Any, sentence: str) -> None:
    source = open_source(Endless(read), split="train", num_endless=6)
    with pytest.raises(TaskError, match=sentence), SampleStream(source, lambda _: {}, batch_size=3).epoch(0) as shares:
        list(shares)

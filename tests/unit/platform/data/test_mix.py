"""Sources mixed by weights: each in its proportion, each row as often as any other of its part, at any cut and step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.data import mix
from orchestray.platform.data.draws import SampleDraws
from orchestray.platform.data.mix import Mix, counts_of
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import Source, Streamed, open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import DataError, TaskError
from support.accounting import WriteParquet, numbered


def mixed(
    write_parquet: WriteParquet, num_rows: int | None = None, weights: Any = (3, 1), window_rows: int = 8
) -> Source:
    """Return a mix of 40 numbered rows, streamed, and of ten in memory, whose columns are in another order."""
    small = numbered(1000, 1010).select(["text", "number", "vector"])
    large = Streamed(write_parquet(25, 15, row_group_rows=5), 8)
    return open_source(Mix([large, small], weights, num_rows), split="train")


def stream(source: Source, **cut: Any) -> SampleStream:
    return SampleStream(source, lambda rows: {"n": rows["number"], "t": rows["text"]}, **{"batch_size": 7, **cut})


def numbers(source: Source, epoch: int = 0, start_step: int = 0, **cut: Any) -> list[list[int]]:
    """Return the numbers of each batch, over all replicas in the order of their ranks."""
    batches: dict[int, list[int]] = {}
    for rank in range(cut.get("num_replicas", 1)):
        with stream(source, rank=rank, **cut).epoch(epoch, start_step) as shares:
            for share in shares:
                for part in share.micro_batches:
                    batches.setdefault(share.step_in_epoch, []).extend(part.batch["n"].to_pylist())
                    assert part.batch["t"].to_pylist() == [f"row {n}" for n in part.batch["n"].to_pylist()]
    return [batches[step] for step in sorted(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@given(weights=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_every_part_has_its_share_of_a_cycle(weights: list[float]) -> None:
    counts = counts_of(weights, len(weights))
    assert sum(counts) == mix.CYCLE
    assert min(counts) >= 1
    exact = [mix.CYCLE * weight / sum(weights) for weight in weights]
    assert all(abs(count - share) <= len(weights) for count, share in zip(counts, exact, strict=True))


def test_a_run_has_the_proportions_and_uses_the_rows_of_a_part_equally_often(
    write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "CYCLE", 16)
    source = mixed(write_parquet)
    assert source.num_rows == 50
    drawn = Counter(number for epoch in range(16) for number in flat(numbers(source, epoch)))
    large, small = ({n: c for n, c in drawn.items() if (n >= 1000) == is_small} for is_small in (False, True))
    assert (sum(large.values()), sum(small.values())) == (600, 200)
    assert set(large.values()) == {15}
    assert set(small.values()) == {20}


@pytest.mark.parametrize("cut", [{"num_replicas": 3}, {"accumulate": 3}, {"num_replicas": 2, "accumulate": 2}], ids=str)
@pytest.mark.parametrize("cycle", [11, 65536])
def test_a_batch_is_the_same_however_it_is_cut(
    write_parquet: WriteParquet, cut: dict[str, Any], cycle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "CYCLE", cycle)
    source = mixed(write_parquet)
    for epoch in (0, 3):
        whole = [sorted(batch) for batch in numbers(source, epoch)]
        assert [sorted(batch) for batch in numbers(source, epoch, **cut)] == whole


def test_a_resumed_epoch_goes_on_with_the_same_batches(write_parquet: WriteParquet) -> None:
    source = mixed(write_parquet, num_rows=33)
    assert numbers(source, 2, start_step=3) == numbers(source, 2)[3:]


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 1}], ids=str)
def test_another_epoch_and_another_seed_have_another_order(write_parquet: WriteParquet, change: dict[str, int]) -> None:
    source = mixed(write_parquet)
    assert numbers(source, **change) != numbers(source)


def test_shares_on_request_are_the_stream_s(write_parquet: WriteParquet) -> None:
    class Order:
        epoch, batch_samples, num_micro_batches = 1, 7, 1

        def __init__(self, step: int) -> None:
            self.step_in_epoch, self.pieces = step, ((7 * step, 7 * step + 7),)

    source = mixed(write_parquet)
    wanted = numbers(source, 1)
    with ShareReader(source, lambda rows: {"n": rows["number"]}) as shares:
        for step in (4, 0, 2, 2, 1):
            assert shares.read(Order(step)).micro_batches[0].batch["n"].to_pylist() == wanted[step]


def test_a_row_that_is_drawn_twice_has_draws_of_its_own_each_time(write_parquet: WriteParquet) -> None:
    found: list[tuple[int, float]] = []

    def augmented(rows: pa.Table, draws: SampleDraws) -> Any:
        found.extend(zip(rows["number"].to_pylist(), [float(each.random()) for each in draws], strict=True))
        return {}

    source = mixed(write_parquet, num_rows=200, weights=(1, 3))
    with SampleStream(source, dict, to_training_batch=augmented, batch_size=20).epoch(1) as shares:
        list(shares)
    drawn = [pair for pair in found if pair[0] >= 1000]
    assert len(drawn) > 100
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [((1,), "2 parts and 1 weights"), ((1, 0), "above 0, got 0"), ((1, float("nan")), "above 0, got nan")],
)
def test_weights_that_do_not_fit_are_refused(write_parquet: WriteParquet, weights: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        mixed(write_parquet, weights=weights)


def test_parts_that_do_not_fit_are_refused() -> None:
    table = pa.table({"x": [1.0]})
    with pytest.raises(DataError, match=r"part 1 has x \(double\), part 2 has x \(int64\)"):
        open_source(Mix([table, pa.table({"x": [1]})], [1, 1]))
    with pytest.raises(DataError, match=r"the train \(part 2\) data is empty"):
        open_source(Mix([table, table.slice(0, 0)], [1, 1]), split="train")
    with pytest.raises(TaskError, match="part 1 is a Mix"):
        open_source(Mix([Mix([table], [1]), table], [1, 1]))
    with pytest.raises(TaskError, match="an epoch without samples"):
        open_source(Mix([table], [1], 0))


def test_columns_are_those_of_the_first_part_in_any_share() -> None:
    exact = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.int64())])
    first = pa.table({"a": [1] * 4, "b": [2] * 4}, schema=exact)
    second = pa.table({"b": [2] * 4, "a": [1] * 4})
    source = open_source(Mix([first, second], [1, 1]))
    for rank in range(8):  # a sample of either part
        cut = {"batch_size": 8, "rank": rank, "num_replicas": 8}
        with SampleStream(source, lambda rows: {"names": rows.column_names}, **cut).epoch(0) as shares:
            assert [share.micro_batches[0].batch["names"] for share in shares] == [["a", "b"]]
    with SampleStream(source, lambda rows: {"rows": rows.to_pylist()}, batch_size=8).epoch(0) as shares:
        assert [share.micro_batches[0].batch["rows"] for share in shares] == [[{"a": 1, "b": 2}] * 8]


def test_columns_of_one_name_are_refused() -> None:
    twice = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["x", "x"])
    with pytest.raises(DataError, match=r"columns with different names, got x \(double\), x \(double\)"):
        open_source(Mix([twice, twice], [1, 1]))

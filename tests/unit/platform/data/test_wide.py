"""Very many columns, gathered as one block: the bits of a table, and a table wherever one is needed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.data.rows import Rows
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.data.tensors import stack_columns, to_tensor
from orchestray.platform.data.wide import LEAST_COLUMNS, WideTable
from orchestray.platform.errors import DataError
from support.accounting import WriteParquet

WIDTH = LEAST_COLUMNS + 3


FLOAT32 = pa.float32()


def table_of(kind: pa.DataType = FLOAT32, rows: int = 7, *, holes: bool = False) -> pa.Table:
    """Return a table with a text first, very many numbers, one number of another type among them, and a list."""
    values = np.arange(rows * WIDTH).reshape(rows, WIDTH) % 251
    columns: dict[str, Any] = {"name": [f"row {row}" for row in range(rows)]}
    for index in range(WIDTH):
        columns[f"x{index}"] = pa.array(values[:, index].astype(kind.to_pandas_dtype()))
        if index == 5:
            columns["y"] = pa.array(np.arange(rows) + 0.5, pa.float16() if kind == pa.float64() else pa.float64())
    if holes:
        columns["x9"] = pa.array([None, *values[1:, 9].tolist()], kind)
    columns["list"] = pa.array([[row] * row for row in range(rows)])
    return pa.table(columns).replace_schema_metadata({"made": "by hand"})


NUMBERS = [f"x{index}" for index in range(WIDTH)]


@given(indices=st.lists(st.integers(0, 6), max_size=9), holes=st.booleans())
def test_gathered_rows_are_those_of_the_table(indices: list[int], holes: bool) -> None:
    table = table_of(holes=holes)
    taken = Rows(table).take(np.array(indices, dtype=np.int64))
    assert isinstance(taken, pa.Table)
    assert type(taken) is WideTable
    wanted = table.take(pa.array(indices, pa.int64()))
    assert taken.schema.equals(wanted.schema, check_metadata=True)
    assert taken.table.equals(wanted)
    assert taken.column_names == wanted.column_names
    assert (taken.num_rows, taken.num_columns) == taken.shape == wanted.shape
    assert len(taken) == len(indices)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int64(), pa.uint8(), pa.float16()], ids=str)
@pytest.mark.parametrize("names", [NUMBERS, NUMBERS[::-1], ["y", *NUMBERS], NUMBERS[3:9], ["x4"]], ids=len)
def test_stacked_columns_have_the_bits_of_each_column_stacked_by_itself(kind: pa.DataType, names: list[str]) -> None:
    table = table_of(kind)
    indices = np.array([6, 0, 3])
    wanted = torch.stack([to_tensor(table[name])[indices].to(torch.float32) for name in names], 1)
    for rows in (Rows(table).take(indices), table.take(indices)):
        stacked = stack_columns(rows, names)
        assert stacked.is_contiguous()
        assert torch.equal(stacked, wanted)


def test_large_numbers_of_several_types_are_rounded_once() -> None:
    odd = 2**60 + 2**36 + 1  # rounded to float64 first, it would be rounded to another float32
    table = pa.table({f"x{index}": pa.array([odd]) if index % 2 else pa.array([0.5]) for index in range(600)})
    names = table.column_names
    wanted = np.array([[odd if index % 2 else 0.5 for index in range(600)]], dtype=object).astype(np.int64)
    stacked = stack_columns(table, names)
    assert torch.equal(stacked[:, 1::2], torch.from_numpy(wanted[:, 1::2].astype(np.float32)))
    assert torch.equal(stacked, stack_columns(Rows(table).take(np.array([0])), names))


def test_a_column_is_the_memory_of_the_block_that_is_stacked() -> None:
    taken = Rows(table_of()).take(np.array([1, 2]))
    to_tensor(taken["x7"]).fill_(9)
    assert stack_columns(taken, NUMBERS)[:, 7].tolist() == [9, 9]
    assert taken.table["x7"].to_pylist() == [9, 9]


def test_gathered_rows_have_memory_of_their_own() -> None:
    rows = Rows(table_of())
    to_tensor(rows.take(np.array([1, 2]))["x7"]).fill_(9)
    assert rows.take(np.array([1]))["x7"].to_pylist() == table_of()["x7"].slice(1, 1).to_pylist()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.select(["x3", "name", "y"]),
        lambda t: t.select([4, 0]),
        lambda t: t.select(t.column_names[::-1]),
        lambda t: t.drop_columns(["x3", "y"]),
        lambda t: t.drop_columns("name"),
        lambda t: t.slice(1, 1),
        lambda t: t.slice(1),
        lambda t: t.slice(5),
        lambda t: t.select(["x3", "x3"]),
        lambda t: t[["x3", "y"]] if isinstance(t, list) else t.select(NUMBERS).slice(0, 1),
        lambda t: t.filter(pc.greater(t["x0"], 3)),
        lambda t: t.append_column("z", t["x1"]),
        lambda t: t.rename_columns([f"{name}!" for name in t.column_names]),
        pa.table,
        lambda t: pickle.loads(pickle.dumps(t)),  # noqa: S301 - packed here
        copy.copy,
        lambda t: pa.concat_tables([pa.table(t), pa.table(t)]),
    ],
)
def test_what_can_be_done_with_a_table_gives_the_same(use: Any) -> None:
    table = table_of().take([4, 2, 0])
    stand_in = Rows(table_of()).take(np.array([4, 2, 0]))
    found, wanted = use(stand_in), use(table)
    assert found.column_names == wanted.column_names
    assert found.to_pylist() == wanted.to_pylist()
    assert found.schema.equals(wanted.schema)


def test_values_and_errors_are_those_of_a_table() -> None:
    table, stand_in = table_of(), Rows(table_of()).take(np.arange(7))
    assert stand_in.to_pylist() == table.to_pylist()
    assert stand_in == table
    assert repr(stand_in) == repr(table)
    assert stand_in.column(3).equals(table.column(3))
    for wrong in ("nosuch", WIDTH + 9):
        with pytest.raises((KeyError, IndexError)) as wanted:
            table[wrong]
        with pytest.raises(type(wanted.value)) as found:
            stand_in[wrong]
        assert str(found.value) == str(wanted.value)
    with pytest.raises(IndexError, match="Offset must be non-negative"):
        stand_in.select(NUMBERS).slice(-1)


def test_a_column_that_cannot_be_stacked_is_named() -> None:
    with pytest.raises(DataError, match=r"column 'x9' has 1 null\(s\)"):
        stack_columns(Rows(table_of(holes=True)).take(np.arange(3)), NUMBERS)
    with pytest.raises(DataError, match=r"column 'x9' has 1 null\(s\)"):
        stack_columns(table_of(holes=True), NUMBERS)


def test_few_columns_and_names_that_repeat_are_tables() -> None:
    few = pa.table({f"x{index}": [1.0] for index in range(LEAST_COLUMNS - 1)})
    twice = pa.Table.from_arrays([pa.array([1.0])] * WIDTH, names=["same"] * WIDTH)
    for table in (few, twice):
        assert type(Rows(table).take(np.array([0]))) is pa.Table


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("window_rows", [4, 100])
def test_batches_are_the_same_streamed_and_in_parts(
    write_parquet: WriteParquet, tmp_path: Any, window_rows: int, accumulate: int
) -> None:
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    pq.write_table(table_of(rows=13), tmp_path / "wide.parquet", row_group_size=3)
    source = open_source(ds.dataset(tmp_path / "wide.parquet"), window_rows=window_rows)
    found = []
    stream = SampleStream(
        source, lambda rows: {"inputs": stack_columns(rows, NUMBERS)}, batch_size=5, accumulate=accumulate
    )
    with stream.epoch(0) as shares:
        for share in shares:
            found += [(part.sample_ids, part.batch["inputs"]) for part in share.micro_batches]
    whole = stack_columns(table_of(rows=13), NUMBERS)
    assert sorted(np.concatenate([ids for ids, _ in found]).tolist()) == list(range(13))
    assert all(torch.equal(inputs, whole[ids]) for ids, inputs in found)

"""Tables and datasets as rows in chunks, on any filesystem."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.data.rows import Rows
from orchestray.platform.data.source import DatasetSource, Streamed, TableSource, open_source
from orchestray.platform.errors import DataError, TaskError
from support.accounting import WriteParquet, numbered

ALL_KINDS = pa.table(
    {
        "int": pa.chunked_array([[1, 2], [3, 4, 5]]),
        "float32": pa.array([1.5, 2.5, 3.5, 4.5, 5.5], pa.float32()),
        "holes": [1, None, 3, None, 5],
        "text": pa.chunked_array([["a", "b", "c"], ["d", None]]),
        "bool": [True, False, True, True, False],
        "category": pa.array(list("xyxyz")).dictionary_encode(),
        "vector": pa.array([[i, i + 1] for i in range(5)], pa.list_(pa.int16(), 2)),
        "nested": pa.array([[[i, 1], [2, i]] for i in range(5)], pa.list_(pa.list_(pa.float64(), 2), 2)),
        "holed vector": pa.array([[1, 2], None, [3, None], [4, 5], [6, 7]], pa.list_(pa.int16(), 2)),
        "ragged": [[1], [], [2, 3], [4], None],
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(30.0).reshape(5, 2, 3)),
        "time": pa.array(range(5), pa.timestamp("us")),
    },
    metadata={"made": "by hand"},
)
PAIRS = pa.list_(pa.list_(pa.float64(), 2), 2)
ALL_KINDS = ALL_KINDS.append_column(
    "struct", pa.array([{"pairs": [[i, 1], [2, i]]} for i in range(5)], pa.struct([("pairs", PAIRS)]))
)


@given(indices=st.lists(st.integers(0, 3), max_size=9), start=st.integers(0, 1))
def test_gathered_rows_are_those_asked_for(indices: list[int], start: int) -> None:
    table = ALL_KINDS.slice(start, 4)
    taken = Rows(table).take(np.array(indices, dtype=np.int64))
    assert taken.schema.equals(table.schema, check_metadata=True)
    assert all(column.num_chunks == 1 for column in taken.columns)
    taken.validate(full=True)
    rows = table.to_pylist()  # not take(): for some nested columns it is wrong after a slice
    assert taken.to_pylist() == [rows[index] for index in indices]


def test_texts_and_bytes_in_views_are_gathered_as_plain_ones(tmp_path: Path) -> None:
    values = {
        "text": pa.chunked_array([["a", None], ["c" * 20]], pa.string_view()),
        "bytes": pa.array([b"a", b"", b"c" * 20], pa.binary_view()),
        "words": pa.array([["a"], None, ["b", "c"]], pa.list_(pa.string_view())),
        "pair": pa.array([["a", "b"]] * 3, pa.list_(pa.string_view(), 2)),
        "person": pa.array([{"name": "a", "age": 3}, {"name": None, "age": 4}, None]).cast(
            pa.struct([("name", pa.string_view()), ("age", pa.int64())])
        ),
    }
    table = pa.table(values, metadata={"made": "by Polars"})
    taken = Rows(table).take(np.array([2, 0]))
    assert taken.to_pylist() == [table.to_pylist()[2], table.to_pylist()[0]]
    assert taken.schema.metadata == table.schema.metadata
    pq.write_table(table.select(["text"]), tmp_path / "views.parquet")
    streamed = open_source(Streamed(ds.dataset(tmp_path), 2))
    assert streamed.first_row().schema == streamed.read([0]).take(np.array([0])).schema


def test_gathered_rows_have_memory_of_their_own() -> None:
    table = pa.table({"x": np.arange(4.0)})
    taken = Rows(table).take(np.arange(4))
    taken["x"].chunk(0).to_numpy()  # a view, which stays read-only; the address tells
    assert taken["x"].chunk(0).buffers()[1].address != table["x"].chunk(0).buffers()[1].address


def test_a_table_is_one_chunk_and_one_window() -> None:
    source = open_source(numbered(0, 10))
    assert (source.num_rows, source.chunk_rows, source.window_rows) == (10, (10,), 10)
    assert source.first_row()["text"].to_pylist() == ["row 0"]


def test_a_dataset_that_fits_a_window_is_a_table(write_parquet: WriteParquet) -> None:
    source = open_source(write_parquet(6, 4, row_group_rows=3), window_rows=10)
    assert isinstance(source, TableSource)
    assert source.read([0]).take(np.arange(10)).to_pylist() == numbered(0, 10).to_pylist()


def test_a_larger_dataset_is_read_by_row_groups(write_parquet: WriteParquet) -> None:
    source = open_source(write_parquet(7, 5, row_group_rows=3), window_rows=6)
    assert isinstance(source, DatasetSource)
    assert source.chunk_rows == (3, 3, 1, 3, 2)
    assert source.num_rows == 12
    assert source.read([4, 0]).take(np.arange(5)).to_pylist() == [
        *numbered(10, 12).to_pylist(),
        *numbered(0, 3).to_pylist(),
    ]
    assert source.first_row().to_pylist() == numbered(0, 1).to_pylist()


def test_a_part_of_a_file_s_row_groups_has_their_rows_only(write_parquet: WriteParquet) -> None:
    whole = write_parquet(9, row_group_rows=3)
    (fragment,) = whole.get_fragments()
    part = ds.FileSystemDataset([fragment.subset(row_group_ids=[0, 2])], whole.schema, whole.format, whole.filesystem)
    assert open_source(part, window_rows=1).chunk_rows == (3, 3)
    assert open_source(part).num_rows == 6


def test_a_filter_holds_in_memory_and_streamed(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(20, row_group_rows=4).filter(pc.field("number").isin([8, 9, 10, 16, 17, 18, 99]))
    wanted = [8, 9, 10, 16, 17, 18]
    for window_rows in (4, 100):
        source = open_source(dataset, window_rows=window_rows)
        assert source.num_rows == 6
        rows = source.read(range(len(source.chunk_rows))).take(np.arange(6))
        assert rows["number"].to_pylist() == wanted
        assert source.first_row()["number"].to_pylist() == [8]
    assert open_source(dataset, window_rows=4).chunk_rows == (3, 3)


def test_columns_come_from_folder_names_too(tmp_path: Path) -> None:
    for year in (2001, 2002):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(numbered(0, 3), tmp_path / f"year={year}" / "rows.parquet")
    source = open_source(ds.dataset(tmp_path, partitioning="hive"), window_rows=2)
    assert source.read([0, 1]).take(np.arange(6))["year"].to_pylist() == [2001] * 3 + [2002] * 3


def test_other_formats_are_read_by_files(tmp_path: Path) -> None:
    for name, rows in (("a", "1\n2\n3\n"), ("b", "4\n5\n")):
        (tmp_path / f"{name}.csv").write_text("x\n" + rows)
    source = open_source(ds.dataset(tmp_path, format="csv"), window_rows=2)
    assert source.chunk_rows == (3, 2)
    assert source.read([1]).take(np.arange(2))["x"].to_pylist() == [4, 5]


def test_record_batches_and_datasets_in_memory_are_taken() -> None:
    batch = numbered(0, 4).to_batches()[0]
    assert open_source(batch).num_rows == 4
    assert open_source(ds.dataset([batch, batch]), window_rows=2).chunk_rows == (8,)
    assert open_source(ds.dataset(numbered(0, 9)).filter(pc.field("number") > 5)).num_rows == 3


@pytest.mark.parametrize("kind", ["subtree", "mock", "fsspec_memory", "file_uri"])
def test_any_filesystem_of_pyarrow_is_read(kind: str, tmp_path: Path) -> None:
    if kind == "subtree":
        filesystem: pafs.FileSystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    elif kind == "mock":
        filesystem = pafs.FileSystem.from_uri("mock://")[0]
    elif kind == "fsspec_memory":
        fsspec = pytest.importorskip("fsspec")
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    else:
        filesystem = pafs.SubTreeFileSystem(*reversed(pafs.FileSystem.from_uri(tmp_path.as_uri())))
    place = "/rows" if kind == "fsspec_memory" else "rows"
    filesystem.create_dir(place)
    pq.write_table(numbered(0, 10), f"{place}/a.parquet", row_group_size=4, filesystem=filesystem)
    source = open_source(ds.dataset(place, filesystem=filesystem), window_rows=4)
    assert source.chunk_rows == (4, 4, 2)
    assert source.read([2]).take(np.arange(2)).to_pylist() == numbered(8, 10).to_pylist()


def test_no_rows_is_an_error_that_names_the_split(write_parquet: WriteParquet) -> None:
    with pytest.raises(DataError, match="the train data is empty: the table has no rows"):
        open_source(numbered(0, 0), split="train")
    with pytest.raises(DataError, match="the data is empty: its files have no rows"):
        open_source(write_parquet(0, 0, row_group_rows=3))
    with pytest.raises(DataError, match="is empty"):
        open_source(write_parquet(9, row_group_rows=3).filter(pc.field("number") > 99))


@pytest.mark.parametrize("data", [[1, 2], {"x": [1]}, None])
def test_what_is_no_table_is_refused_saying_what_was_wanted(data: object) -> None:
    kind = type(data).__name__
    with pytest.raises(TaskError, match=rf"must return a pyarrow.Table or a pyarrow.dataset.Dataset, got a .*{kind}"):
        open_source(data)


def test_a_table_that_is_to_be_streamed_is_refused_with_what_to_do() -> None:
    with pytest.raises(TaskError, match=r"Streamed takes a pyarrow\.dataset\.Dataset, got a Table.* as it is"):
        open_source(Streamed(pa.table({"a": [1]}), window_rows=1))


def test_a_truncated_file_is_named_when_it_is_opened(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(10, 10, 10, row_group_rows=5)
    victim = Path(dataset.files[1])
    victim.write_bytes(victim.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"cannot read {re.escape(str(victim))}: .*\. Is the file whole"):
        open_source(dataset, window_rows=5)


def test_a_file_damaged_while_in_use_is_named_when_it_is_read(write_parquet: WriteParquet) -> None:
    dataset = write_parquet(10, 10, row_group_rows=5)
    source = open_source(dataset, window_rows=5)
    victim = Path(dataset.files[1])
    victim.write_bytes(victim.read_bytes()[:100])
    assert source.read([0]).num_rows == 5
    with pytest.raises(DataError, match=re.escape(f"cannot read {victim}")):
        source.read([2])
    victim.unlink()
    with pytest.raises(DataError, match=re.escape(f"cannot read {victim}")):
        source.read([3])


def test_a_file_that_changed_while_in_use_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n2\n3\n")
    source = open_source(ds.dataset(tmp_path, format="csv"), window_rows=2)
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"a\.csv changed while it was in use: 3 rows were there at the start, now 1"):
        source.read([0])

"""Sources of samples: a table in memory, or a dataset on any filesystem that is read in windows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from orchestray.platform.data.by_length import ByLength, LengthSource
from orchestray.platform.data.endless import Endless, endless_source
from orchestray.platform.data.in_order import InOrder, InOrderSource
from orchestray.platform.data.mix import Mix, MixedSource
from orchestray.platform.data.retries import READS, read_patiently
from orchestray.platform.data.rows import Rows, without_views
from orchestray.platform.errors import DataError, TaskError
from orchestray.platform.process.alike import drawing_alike

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from orchestray.platform.task import Task

Data: TypeAlias = "pa.Table | ds.Dataset | Streamed | Mix | Endless | ByLength | InOrder"
"""Data that a task's `dataset(split)` may return."""

WINDOW_ROWS = 65536
"""Least number of rows of a window, unless the data ends; a dataset with at most as many is held in memory."""

VALIDATION = "validation"
"""The split that a task need not have."""
_FOOTERS_AT_ONCE = 16


@dataclass(frozen=True)
class Streamed:
    """A dataset that is streamed in windows of another size than `WINDOW_ROWS`, as images need."""

    dataset: ds.Dataset
    window_rows: int
    """Least number of rows of a window; a dataset with at most as many is held in memory."""


class Source(Protocol):
    """A source of rows in chunks; a chunk is the smallest unit of reading."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of each chunk, in the dataset's order; none is empty."""
        ...

    @property
    def window_rows(self) -> int:
        """Least number of rows of the windows in which an epoch is shuffled."""
        ...

    def read(self, chunks: Sequence[int]) -> Rows:
        """Return the rows of some chunks, concatenated.

        Raises:
            DataError: a file cannot be read; it is named.
        """
        ...

    def first_row(self) -> pa.Table:
        """Return a table with the first row, which shows the form of a sample."""
        ...


class TableSource:
    """A table in memory: one chunk, shuffled as a whole."""

    def __init__(self, table: pa.Table) -> None:
        self._rows = Rows(table)
        self._first = self._rows.take(np.arange(min(1, table.num_rows)))  # a slice would keep the whole table

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return (self._rows.num_rows,) if self._rows.num_rows else ()

    @property
    def window_rows(self) -> int:
        return self._rows.num_rows

    def read(self, chunks: Sequence[int]) -> Rows:
        return self._rows

    def first_row(self) -> pa.Table:
        return self._first


@dataclass(frozen=True)
class Chunk:
    """A row group of a Parquet file, or a whole file of another format."""

    fragment: ds.Fragment
    row_group: int | None
    num_rows: int


class DatasetSource:
    """A dataset that is read in chunks on demand; nothing stays in memory here."""

    def __init__(self, chunks: Sequence[Chunk], schema: pa.Schema, row_filter: Any, window_rows: int) -> None:
        self._chunks = chunks
        self._schema = schema
        self._filter = row_filter
        self._window_rows = window_rows

    @cached_property
    def num_rows(self) -> int:
        return sum(self.chunk_rows)

    @cached_property
    def chunk_rows(self) -> tuple[int, ...]:
        return tuple(chunk.num_rows for chunk in self._chunks)

    @property
    def window_rows(self) -> int:
        return self._window_rows

    def read(self, chunks: Sequence[int]) -> Rows:
        return Rows(self.table(chunks))

    def table(self, chunks: Sequence[int]) -> pa.Table:
        """Return the rows of some chunks as a table."""
        return pa.concat_tables([self._read(self._chunks[chunk]) for chunk in chunks])

    def first_row(self) -> pa.Table:
        piece = _piece(self._chunks[0])
        scanner = partial(piece.scanner, schema=self._schema, filter=self._filter)
        return without_views(read_patiently(lambda: scanner().head(1), _place(piece), was_there=True))

    def _read(self, chunk: Chunk) -> pa.Table:
        piece = _piece(chunk)
        read = partial(piece.to_table, schema=self._schema, filter=self._filter)
        table = read_patiently(read, _place(piece), was_there=True)
        if table.num_rows != chunk.num_rows:
            raise DataError(
                f"{_place(piece)} changed while it was in use: {chunk.num_rows} rows were there at the start, now "
                f"{table.num_rows}. Train on data that stays as it is."
            )
        return table


def open_split(task: Task, split: str, *, num_endless: int | None = None) -> Source:
    """Open the data of a split of a task.

    Args:
        task: the task.
        split: name of the split.
        num_endless: same as in `open_source`.

    Raises:
        DataError: it cannot be read, also not when it is tried again, or is empty.
        TaskError: `dataset` returns something else.
    """
    read = partial(open_source, split=split, num_endless=num_endless)
    return read_patiently(lambda: read(_dataset(task, split)), f"the {split} data")


def first_row(task: Task) -> pa.Table:
    """Return a table with the first row of a task's training data, which may have no end.

    Raises:
        DataError: it cannot be read, or is empty.
        TaskError: `dataset` returns something else.
    """
    return open_split(task, "train", num_endless=1).first_row()


def _dataset(task: Task, split: str) -> Any:
    try:
        with drawing_alike():
            return task.dataset(split)
    except NotImplementedError as error:
        if split != VALIDATION:
            raise
        READS.warn(
            f"the task has no validation data: {str(error) or 'NotImplementedError'}. This run does not validate"
        )
        return None


def open_source(
    data: Data | None, *, window_rows: int = WINDOW_ROWS, split: str | None = None, num_endless: int | None = None
) -> Source:
    """Open the result of a task's `dataset(split)`.

    A table, and a dataset of at most `window_rows` rows, is held in memory and shuffled as a whole. A larger dataset is
    streamed: Parquet by row groups, other formats by files. At most two windows are in memory, each of the fewest
    chunks that have `window_rows` rows together.

    Args:
        data: a table, or a dataset, which may be filtered. None for "validation": there is none.
        window_rows: rows of a window.
        split: name of the split. That of "validation" may be empty, like one that is None.
        num_endless: number of samples of the whole run, for data that have no end; None: it is not known.

    Raises:
        DataError: the data is empty, or a file cannot be read; it is named.
        TaskError: `data` is something else.
    """
    which = f"the {split} data" if split else "the data"
    if isinstance(data, Endless | Mix | ByLength | InOrder):
        return _in_own_order(data, window_rows, split, num_endless)
    may_be_empty = split == VALIDATION
    if data is None and may_be_empty:
        return TableSource(pa.table({}))
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return _held(data, which, may_be_empty)
    import pyarrow.dataset as ds  # takes half a second, as it imports pandas: a task with a table does not need it

    if isinstance(data, Streamed):
        if not isinstance(data.dataset, ds.Dataset):
            raise TaskError(
                f"Streamed takes a pyarrow.dataset.Dataset, got a {type(data.dataset).__qualname__}. Return a table as "
                "it is: it is in memory, and needs no windows."
            )
        window_rows = data.window_rows
        data = data.dataset
    if isinstance(data, ds.InMemoryDataset):
        return _held(data.to_table(), which, may_be_empty)
    if not isinstance(data, ds.Dataset):
        raise TaskError(
            f"The task's dataset({split!r}) must return a pyarrow.Table or a pyarrow.dataset.Dataset, got a "
            f"{type(data).__module__}.{type(data).__qualname__}. "
            "pyarrow.table(...) and pyarrow.Table.from_pandas(...) make one."
        )
    files, row_filter = _without_filter(data)
    chunks = _chunks_of(files, row_filter)
    source = DatasetSource(chunks, data.schema, row_filter, window_rows)
    if not source.num_rows:
        _refuse_empty(f"{which} is empty: its files have no rows. Check the path and the filter", may_be_empty)
        return TableSource(data.schema.empty_table())
    if source.num_rows > window_rows:
        return source
    return TableSource(source.table(range(len(chunks))))


def _in_own_order(
    data: Endless | Mix | ByLength | InOrder, window_rows: int, split: str | None, num_endless: int | None
) -> Source:
    """Open data with an order of their own; the other arguments are those of `open_source`."""
    if isinstance(data, Endless):
        return endless_source(data, split=split, num_rows=num_endless)
    if isinstance(data, Mix):
        return _mixed(data, window_rows, split)
    if isinstance(data, InOrder):
        if not isinstance(data.table, pa.Table):
            raise TaskError(f"InOrder takes a pyarrow.Table, got a {type(data.table).__qualname__}")
        return InOrderSource(open_source(data.table, window_rows=window_rows, split=split))
    _check_plain(data.data, "ByLength takes a table or a dataset; its data")
    return LengthSource(open_source(data.data, window_rows=window_rows, split=split), data.column, data.run_rows)


def _mixed(mix: Mix, window_rows: int, split: str | None) -> MixedSource:
    parts = []
    for number, part in enumerate(mix.parts, start=1):
        _check_plain(part, f"the parts of a Mix must be tables or datasets; part {number}")
        parts.append(open_source(part, window_rows=window_rows, split=f"{split or 'mixed'} (part {number})"))
    return MixedSource(parts, mix.weights, mix.num_rows)


def _check_plain(data: Any, wanted: str) -> None:
    if isinstance(data, Mix | Endless | ByLength | InOrder):
        raise TaskError(f"{wanted} is a {type(data).__name__}")


def _held(table: pa.Table, which: str, may_be_empty: bool) -> TableSource:
    if not table.num_rows:
        text = f"{which} is empty: the table has no rows. Check what the task's dataset() returns"
        _refuse_empty(text, may_be_empty)
    return TableSource(table)


def _refuse_empty(text: str, may_be_empty: bool) -> None:
    if not may_be_empty:
        raise DataError(f"{text}.")
    READS.warn(f"{text}, or return None if there is none. This run does not validate")


def _without_filter(dataset: ds.Dataset) -> tuple[ds.Dataset, Any]:
    """Return a dataset that gives its files, and the filter of its rows.

    A filtered dataset refuses to name its files, and gives its filter only by this private attribute.
    """
    row_filter = dataset._scan_options.get("filter")
    if row_filter is not None:
        dataset = dataset.replace_schema(dataset.schema)  # a copy
        dataset._scan_options = {}
    return dataset, row_filter


def _chunks_of(dataset: ds.Dataset, row_filter: Any) -> list[Chunk]:
    """Return all non-empty chunks, in the dataset's order; reads the files' footers, several at a time."""
    fragments = list(dataset.get_fragments())
    with ThreadPoolExecutor(min(_FOOTERS_AT_ONCE, len(fragments) or 1), "footers") as pool:
        found = pool.map(lambda fragment: _chunks_in(fragment, row_filter), fragments)
        return [chunk for chunks in found for chunk in chunks if chunk.num_rows]


def _chunks_in(fragment: ds.Fragment, row_filter: Any) -> list[Chunk]:
    import pyarrow.dataset as ds

    def read() -> list[Chunk]:
        if not isinstance(fragment, ds.ParquetFileFragment):
            return [Chunk(fragment, None, fragment.count_rows(filter=row_filter))]
        return [Chunk(fragment, group.id, _rows_of(fragment, group, row_filter)) for group in fragment.row_groups]

    return read_patiently(read, _place(fragment), was_there=True)


def _rows_of(fragment: ds.ParquetFileFragment, group: Any, row_filter: Any) -> int:
    # Not count_rows() without a filter: it counts the whole file, whatever row groups were selected.
    if row_filter is None:
        return int(group.num_rows)
    return int(fragment.subset(row_group_ids=[group.id]).count_rows(filter=row_filter))


def _piece(chunk: Chunk) -> ds.Fragment:
    return chunk.fragment if chunk.row_group is None else chunk.fragment.subset(row_group_ids=[chunk.row_group])


def _place(fragment: ds.Fragment) -> str:
    return str(getattr(fragment, "path", "the data"))

"""Parquet files on any filesystem, opened and split into rows for training and rows for validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import torch

from orchestray.platform.data.order import split_rows, window_order
from orchestray.platform.data.retries import read_patiently
from orchestray.platform.data.rows import without_views
from orchestray.platform.data.source import WINDOW_ROWS
from orchestray.platform.data.tensors import refuse_nulls, to_tensor
from orchestray.platform.errors import DataError, TaskError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_SHOWN = 5
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


def open_files(place: str, key: str) -> ds.FileSystemDataset:
    """Return the dataset of a file, a directory (folders named `column=value` add a column) or a `pyarrow.fs` URI.

    Args:
        place: path or URI.
        key: config key, for errors.

    Raises:
        TaskError: the place does not exist, or the URI has no filesystem.
        DataError: a file is damaged or not Parquet.
    """
    try:
        filesystem, path = pafs.FileSystem.from_uri(place) if _SCHEME.match(place) else (pafs.LocalFileSystem(), place)
    except (pa.ArrowException, OSError, ImportError) as error:
        raise TaskError(f"{key}: no filesystem for {place}: {error}") from error

    def open_there() -> ds.FileSystemDataset:
        if filesystem.get_file_info(path).type == pafs.FileType.NotFound:
            raise TaskError(f"{key}: there is nothing at {place}")
        return ds.dataset(path, filesystem=filesystem, format="parquet", partitioning="hive")

    return read_patiently(open_there, place)


def check_columns(names: Sequence[str], schema: pa.Schema, place: str) -> None:
    """Refuse columns that a table does not have.

    Args:
        names: names of the columns.
        schema: schema of the table.
        place: path or URI, for errors.

    Raises:
        TaskError: names the first column that is missing.
    """
    for name in names:
        if name not in schema.names:
            close = get_close_matches(name, schema.names, n=1)
            nearest = f" (did you mean '{close[0]}'?)" if close else ""
            raise TaskError(f"there is no column '{name}' in {place}{nearest}; it has {', '.join(schema.names)}")


def class_indices(column: pa.ChunkedArray, classes: Sequence[Any], name: str) -> Tensor:
    """Return the index of each label among the classes, [rows] int64.

    Args:
        column: the labels; they may be encoded as a dictionary.
        classes: values of the classes.
        name: name of the column, for errors.

    Raises:
        DataError: a label is null, no class, or of another type than the classes.
    """
    if column.null_count:
        raise DataError(f"column '{name}' has {column.null_count} null(s): fill or drop them")
    some = ", ".join(map(repr, classes))
    shown = some if len(classes) <= _MOST_SHOWN else f"{classes[0]!r} to {classes[-1]!r}"
    values = pa.array(classes)
    try:
        indices = pc.index_in(column.cast(values.type), value_set=values)
    except pa.ArrowException as error:
        raise DataError(f"the label '{name}' is of type {column.type}, and the classes are {shown}: {error}") from error
    if indices.null_count:
        unknown = column.filter(indices.is_null())[0].as_py()
        raise DataError(f"the label '{name}' has the value {unknown!r}, which is no class: classes are {shown}")
    return to_tensor(indices, name).to(torch.int64)


def values_of(columns: pa.Table, name: str) -> list[Any]:
    """Return the values of a column.

    Raises:
        DataError: one is null.
    """
    refuse_nulls(columns[name], columns[name], name)
    values: list[Any] = columns[name].to_pylist()
    return values


def holds_parquet(place: str) -> bool:
    """Return True if a place is, or holds, Parquet files; a folder of images does not."""
    if not _SCHEME.match(place) and (folder := Path(place)).is_dir():
        return next(folder.rglob("*.parquet"), None) is not None
    return bool(_SCHEME.match(place)) or place.endswith(".parquet")


def part(
    data: ds.FileSystemDataset,
    place: str,
    columns: Sequence[str],
    validation_fraction: float,
    *,
    validation: bool,
    window_rows: int | None = None,
) -> pa.Table | ds.Dataset:
    """Return the validation part or the training part of some columns, the same at every call and on every machine.

    If there are at most that many rows, or only one row group, the rows are drawn at random and read into memory.
    From a larger table whole row groups are drawn, so that both parts can be streamed. The validation part then has at
    least one row group, and is as close to the fraction as row groups allow.

    Args:
        data: the table.
        place: path or URI, for errors.
        columns: columns to return.
        validation_fraction: fraction of the rows in the validation part.
        validation: True for the validation part.
        window_rows: largest number of rows that are read into memory; default: `WINDOW_ROWS`.
    """

    def split_up() -> list[ds.Fragment]:
        return [piece for fragment in data.get_fragments() for piece in fragment.split_by_row_group()]

    pieces = read_patiently(split_up, place)
    sizes = [sum(group.num_rows for group in piece.row_groups) for piece in pieces]
    if sum(sizes) > (window_rows or WINDOW_ROWS) and len(pieces) > 1:
        chosen = set(_groups_for_validation(sizes, validation_fraction))
        kept = [piece for index, piece in enumerate(pieces) if (index in chosen) == validation]
        schema = pa.schema([data.schema.field(name) for name in columns])
        return ds.FileSystemDataset(kept, schema, data.format, data.filesystem)
    table = without_views(read_patiently(partial(data.to_table, columns=list(columns)), place))
    held_out, rest = split_rows(table.num_rows, validation_fraction)
    return table.take(pa.array(sorted((held_out if validation else rest).tolist()), pa.int64()))


def _groups_for_validation(sizes: Sequence[int], fraction: float) -> list[int]:
    wanted = fraction * sum(sizes)
    chosen: list[int] = []
    for group in window_order([len(sizes)], seed=0, epoch=0).tolist()[:-1]:
        rows = sum(sizes[index] for index in chosen)
        if chosen and rows + sizes[group] / 2 > wanted:
            break
        chosen.append(group)
    return chosen

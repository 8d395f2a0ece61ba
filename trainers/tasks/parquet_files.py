"""Parquet files on any filesystem, opened and split into rows for training and rows for validation."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from orchestray.platform.data.order import split_rows, window_order
from orchestray.platform.data.source import WINDOW_ROWS, reading
from orchestray.platform.errors import TaskError

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
    with reading(place):
        if filesystem.get_file_info(path).type == pafs.FileType.NotFound:
            raise TaskError(f"{key}: there is nothing at {place}")
        return ds.dataset(path, filesystem=filesystem, format="parquet", partitioning="hive")


def part(
    data: ds.FileSystemDataset, place: str, columns: Sequence[str], validation_fraction: float, *, validation: bool
) -> pa.Table | ds.Dataset:
    """Return the validation part or the training part of some columns, the same at every call and on every machine.

    If there are at most `WINDOW_ROWS` rows, or only one row group, the rows are drawn at random and read into memory.
    From a larger table whole row groups are drawn, so that both parts can be streamed. The validation part then has at
    least one row group, and is as close to the fraction as row groups allow.

    Args:
        data: the table.
        place: path or URI, for errors.
        columns: columns to return.
        validation_fraction: fraction of the rows in the validation part.
        validation: True for the validation part.
    """
    with reading(place):
        pieces = [piece for fragment in data.get_fragments() for piece in fragment.split_by_row_group()]
        sizes = [sum(group.num_rows for group in piece.row_groups) for piece in pieces]
        if sum(sizes) > WINDOW_ROWS and len(pieces) > 1:
            chosen = set(_groups_for_validation(sizes, validation_fraction))
            kept = [piece for index, piece in enumerate(pieces) if (index in chosen) == validation]
            schema = pa.schema([data.schema.field(name) for name in columns])
            return ds.FileSystemDataset(kept, schema, data.format, data.filesystem)
        table = data.to_table(columns=list(columns))
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

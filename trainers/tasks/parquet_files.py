"""Parquet on any filesystem, opened and parted into rows to train on and rows to validate on."""

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
    """The dataset of a file, a directory (folders named `column=value` add a column) or a `pyarrow.fs` URI.

    Args:
        place: path or URI.
        key: of the config, for errors.

    Raises:
        TaskError: there is nothing, or no filesystem for the URI.
        DataError: a file is damaged or no Parquet.
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
    """The part of some columns that is for validation, or the part that is not; the same on every call and machine.

    Rows are drawn at random where there are at most `WINDOW_ROWS` of them or all are in one row group; they are read
    into memory. Of a larger table whole row groups are drawn, so that both parts can be streamed; the part is then as
    near to the fraction as row groups allow, at least one of them.
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

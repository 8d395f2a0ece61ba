"""Parquet files to read from."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from support.accounting import WriteParquet, numbered


@pytest.fixture
def write_parquet(tmp_path: Path) -> WriteParquet:
    """Return a function that writes a file for each number of rows, numbered through, and opens them as a dataset."""

    def write(*rows_of_files: int, row_group_rows: int) -> ds.Dataset:
        folder = tmp_path / f"set-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        start = 0
        for index, rows in enumerate(rows_of_files):
            pq.write_table(
                numbered(start, start + rows), folder / f"part-{index:03}.parquet", row_group_size=row_group_rows
            )
            start += rows
        return ds.dataset(folder, format="parquet")

    return write

"""The parts of the training data for weights and for an architecture."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from orchestray.platform.data.source import Streamed
from orchestray.search.trials.one_shot.data import two_parts
from support.accounting import numbered


def test_data_that_are_read_in_windows_of_another_size_are_read_in_them(tmp_path: Path) -> None:
    pq.write_table(numbered(0, 40), tmp_path / "rows.parquet", row_group_size=5)
    task: Any = SimpleNamespace(dataset=lambda _split: Streamed(ds.dataset(tmp_path / "rows.parquet"), 8))
    parts = two_parts(task, 0.25)
    assert [part.window_rows for part in parts] == [8, 8]
    assert [part.chunk_rows for part in parts] == [(5,) * 6, (5,) * 2]

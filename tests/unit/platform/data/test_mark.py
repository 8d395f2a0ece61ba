"""Marks that tell data apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from orchestray.platform.data.mark import mark_of, warn_of_shared_rows
from orchestray.platform.data.retries import READS
from orchestray.platform.data.source import open_source


def test_other_rows_and_another_order_have_another_mark_and_the_same_rows_the_same(tmp_path: Path) -> None:
    rows = pa.table({"text": ["a", None, "b"] * 5, "list": [[1.0], [float("nan")], []] * 5})
    again, turned = pa.concat_tables([rows.slice(0, 4), rows.slice(4)]), rows.take([*range(14, -1, -1)])
    assert mark_of(open_source(rows)) == mark_of(open_source(again))
    assert mark_of(open_source(rows)) != mark_of(open_source(turned))
    assert mark_of(open_source(rows.slice(0, 14)))[0] == 14
    ds.write_dataset(rows, tmp_path, format="parquet")
    assert mark_of(open_source(ds.dataset(tmp_path))) == mark_of(open_source(rows))
    assert mark_of(open_source(None, split="validation")) == [0, 0]


@pytest.mark.parametrize(
    ("train", "validation", "texts"),
    [(range(20), range(8), 1), (range(3), range(3), 1), (range(20), [1, *range(1, 8)], 0), (range(20), [], 0)],
    ids=["drawn twice", "the same few", "another first row", "none"],
)
def test_a_run_is_warned_that_validates_on_the_rows_that_it_trains_on(
    train: Sequence[int], validation: Sequence[int], texts: int
) -> None:
    said: list[str] = []
    READS.begin(said.append)
    tables = [pa.table({"x": pa.array([float(value) for value in rows])}) for rows in (train, validation)]
    warn_of_shared_rows(open_source(tables[0]), open_source(tables[1] if validation else None, split="validation"))
    READS.begin(None)
    assert len(said) == texts
    assert all("the same rows as the training data" in text for text in said)

"""Batches of samples that are about as long as each other, so that little of them is padding.

The samples of an epoch are shuffled as always; then each run of them is sorted by length. The order so depends on the
seed, the epoch and the data alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestray.platform.data.arranging import Arranging
from orchestray.platform.errors import DataError, TaskError

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.rows import Rows
    from orchestray.platform.data.source import Source, Streamed

_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


@dataclass(frozen=True)
class ByLength:
    """A table or dataset whose training batches have samples of about the same length."""

    data: pa.Table | ds.Dataset | Streamed
    column: str
    """Column of texts, bytes or lists, whose length is that of a sample."""
    run_rows: int = 1024
    """Number of shuffled samples that are sorted together, the longest first; a batch should be a small part of it."""


class LengthSource(Arranging):
    """A source of rows in runs of falling length; see `ByLength`."""

    def __init__(self, source: Source, column: str, run_rows: int) -> None:
        """
        Args:
            source: source of the rows.
            column: same as in `ByLength`.
            run_rows: same as in `ByLength`.

        Raises:
            TaskError: `run_rows` is below 1.
            DataError: there is no such column, or its values have no lengths that differ.
        """
        if run_rows < 1:
            raise TaskError(f"ByLength(run_rows={run_rows}) sorts nothing: it must be 1 or more")
        schema = source.first_row().schema
        if column not in schema.names:
            raise DataError(f"the data has no column {column!r} to sort by; it has {', '.join(schema.names)}")
        if _lengths(pa.array([], schema.field(column).type)) is None:
            raise DataError(
                f"column {column!r} is of type {schema.field(column).type}, and samples are sorted by the length of a "
                "text or a list"
            )
        super().__init__(source)
        self._column, self._run_rows = column, run_rows

    def arrange(self, rows: Rows, permutation: Indices) -> Indices:
        found = _lengths(rows.column(self._column))
        assert found is not None
        lengths = np.nan_to_num(found.to_numpy(zero_copy_only=False))  # null is as short as can be
        runs = [permutation[start : start + self._run_rows] for start in range(0, len(permutation), self._run_rows)]
        return np.concatenate([run[np.argsort(-lengths[run], kind="stable")] for run in runs])


def _lengths(column: pa.Array | pa.ChunkedArray) -> pa.Array | None:
    """Return the length of each value, or None if values of this type have none."""
    if any(check(column.type) for check in _TEXTS):
        found = pc.binary_length(column)
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        found = pc.list_value_length(column)
    else:
        return None
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

"""Rows that are used in their own order in each epoch, for models that remember what came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.rows import Rows
    from orchestray.platform.data.source import Source


@dataclass(frozen=True)
class InOrder:
    """A table whose rows are trained on in their order: row 0 first, in every epoch and with every seed."""

    table: pa.Table


class InOrderSource:
    """A source of rows in the order of a table; see `InOrder`."""

    def __init__(self, source: Source) -> None:
        """
        Args:
            source: source of a table in memory.
        """
        self._source = source

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return self._source.chunk_rows

    @property
    def window_rows(self) -> int:
        return self._source.window_rows

    def read(self, chunks: Sequence[int]) -> Rows:
        return self._source.read(chunks)

    def first_row(self) -> pa.Table:
        return self._source.first_row()

    def arrange(self, rows: Rows, permutation: Indices) -> Indices:
        """Return the rows of the only window in their own order, whatever the permutation."""
        return np.arange(len(permutation))

"""The base of sources that arrange the rows of a window in an order of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.rows import Rows
    from orchestray.platform.data.source import Source


class Arranging(ABC):
    """A source of another one's rows, which arranges those of each window after they are shuffled."""

    def __init__(self, source: Source) -> None:
        """
        Args:
            source: source of the rows.
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

    @abstractmethod
    def arrange(self, rows: Rows, permutation: Indices) -> Indices:
        """Return the rows of a window in the order of use, given a random one."""

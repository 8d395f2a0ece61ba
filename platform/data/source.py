"""Where rows come from: a table in memory, or a dataset read one window of row groups at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from orchestray.platform.data.order import Window, windows
from orchestray.platform.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow.dataset as ds

WINDOW_ROWS = 65536
"""Rows of a streamed dataset that are mixed with each other, and held at a time."""


@dataclass(frozen=True)
class Rows:
    """The rows of a window in their final order: `table`, and each row's index in the whole data."""

    table: pa.Table
    sample_ids: np.ndarray[Any, np.dtype[np.int64]]


class Source:
    """Rows in blocks that can be read one by one."""

    def __init__(self, block_rows: Sequence[int], window_rows: int) -> None:
        self.block_rows = tuple(block_rows)
        self.num_rows = sum(block_rows)
        self.window_rows = window_rows
        starts = np.concatenate([[0], np.cumsum(block_rows)])
        self._starts = [int(start) for start in starts]

    def windows(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Window]:
        """The order of an epoch."""
        return windows(self.block_rows, window_rows=self.window_rows, seed=seed, epoch=epoch, shuffle=shuffle)

    def read(self, window: Window) -> Rows:
        """Read a window's blocks and leave its order to `Rows.sample_ids` and the permutation of the window."""
        tables = [self.read_block(block) for block in window.blocks]
        table = (tables[0] if len(tables) == 1 else pa.concat_tables(tables)).combine_chunks()
        ids = np.concatenate([np.arange(self._starts[b], self._starts[b + 1]) for b in window.blocks])
        return Rows(table, ids)

    def read_block(self, block: int) -> pa.Table:
        """The rows of one block.

        Raises:
            DataError: they cannot be read.
        """
        raise DataError(f"block {block} of this source cannot be read")


class TableSource(Source):
    """A table in memory: one block, so that an epoch is a permutation of all rows."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__([table.num_rows], max(1, table.num_rows))
        self._table = table.combine_chunks()

    def read_block(self, block: int) -> pa.Table:
        return self._table


class DatasetSource(Source):
    """A dataset of files: its blocks are row groups where the format has them, else files."""

    def __init__(self, dataset: ds.Dataset, window_rows: int) -> None:
        self._dataset = dataset
        self._blocks: list[Any] = []
        rows: list[int] = []
        for fragment in dataset.get_fragments():
            with _reading(fragment):
                pieces = fragment.split_by_row_group() if hasattr(fragment, "split_by_row_group") else [fragment]
                for piece in pieces:
                    self._blocks.append(piece)
                    rows.append(piece.count_rows())
        super().__init__(rows, window_rows)

    def read_block(self, block: int) -> pa.Table:
        fragment = self._blocks[block]
        with _reading(fragment):
            table: pa.Table = fragment.to_table(schema=self._dataset.schema)
        return table


class _reading:  # noqa: N801 - reads as a statement: with _reading(fragment)
    def __init__(self, fragment: Any) -> None:
        self._fragment = fragment

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError)):
            path = getattr(self._fragment, "path", "the dataset")
            raise DataError(
                f"The data file {path} cannot be read: {str(error).splitlines()[0]} It may be truncated or of another format: "
                "check or write it again."
            ) from error


def open_source(data: pa.Table | ds.Dataset, *, window_rows: int = WINDOW_ROWS) -> Source:
    """Rows of a table or a dataset.

    A dataset of at most `window_rows` rows is read into memory; a larger one is streamed, two windows at a time.

    Raises:
        DataError: there are no rows, or they cannot be read.
    """
    if not isinstance(data, pa.Table) and not hasattr(data, "get_fragments"):
        raise DataError(
            f"The task's dataset() returned a {type(data).__name__}; wanted a pyarrow.Table or a pyarrow.dataset.Dataset."
        )
    if isinstance(data, pa.Table):
        source: Source = TableSource(data)
    else:
        source = DatasetSource(data, window_rows)
        if 0 < source.num_rows <= window_rows:
            tables = [source.read_block(block) for block in range(len(source.block_rows))]
            source = TableSource(pa.concat_tables(tables))
    if source.num_rows == 0:
        raise DataError("The task's dataset is empty: it has no rows to train on. Check its path, split or filter.")
    return source

"""Rows that know their number, and a source that keeps account of what is read and what is held."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from orchestray.platform.data.rows import Rows
from orchestray.platform.data.source import Source

WriteParquet = Callable[..., ds.Dataset]


def numbered(start: int, stop: int) -> pa.Table:
    """Return rows that know their number, in columns of several kinds."""
    number = np.arange(start, stop)
    vector = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(number.astype(np.float32), 3)), 3)
    return pa.table({"number": number, "vector": vector, "text": [f"row {n}" for n in number]})


@dataclass(frozen=True)
class Wanted:
    """A request for a share."""

    epoch: int
    step_in_epoch: int
    pieces: tuple[tuple[int, int], ...]
    batch_samples: int
    num_micro_batches: int


class Accounting:
    """A source that notes every read, and how many rows of what it gave out are alive."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._alive: dict[int, int] = {}
        self.reads: list[tuple[int, ...]] = []
        self.most_rows_alive = 0
        self.fail_at_read = -1

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return self._source.chunk_rows

    @property
    def window_rows(self) -> int:
        return self._source.window_rows

    @property
    def rows_alive(self) -> int:
        gc.collect()
        return sum(self._alive.values())

    def read(self, chunks: Sequence[int]) -> Rows:
        with self._lock:
            if len(self.reads) == self.fail_at_read:
                raise OSError("the disk is gone")
            self.reads.append(tuple(chunks))
            number = len(self.reads)
            # Counted from the moment the reading begins.
            self._alive[number] = sum(self.chunk_rows[chunk] for chunk in chunks)
            self.most_rows_alive = max(self.most_rows_alive, sum(self._alive.values()))
        rows = self._source.read(chunks)
        weakref.finalize(rows, self._alive.pop, number)
        return rows

    def first_row(self) -> pa.Table:
        return self._source.first_row()

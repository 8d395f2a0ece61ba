"""Data of unknown length, read one after the other: a generator, or files whose rows nobody has counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from orchestray.platform.data.order import Indices, Window
from orchestray.platform.data.retries import STOP, read_patiently
from orchestray.platform.data.rows import Rows
from orchestray.platform.data.windows import LoadedWindow, take_across
from orchestray.platform.errors import ConfigError, DataError, TaskError

_WANTED = "wanted a function that returns a list or an iterator of pyarrow tables or record batches"


@dataclass(frozen=True)
class Endless:
    """Training data of unknown length, for a run of `train.steps`.

    Rows are taken in windows, and each window is shuffled. Every worker reads all of it, and takes its share. A resumed
    run reads again, without computing, what lies before the step that it goes on from.
    """

    read: Callable[[int], Iterable[pa.Table | pa.RecordBatch]]
    """Returns the rows of a pass, whose number counts from 0, the same at every call. The next pass begins where one
    ends."""
    window_rows: int = 65536
    """Least number of rows of a window, unless a pass ends."""


@dataclass(frozen=True)
class EndlessSource:
    """A source of rows of which nobody knows the number; see `Endless`."""

    data: Endless
    num_rows: int
    """Number of samples of the whole run, which is taken for one epoch."""

    @property
    def window_rows(self) -> int:
        return self.num_rows

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return (self.num_rows,)

    def read(self, chunks: Sequence[int]) -> Rows:
        """Refuse: rows are taken by their positions."""
        raise TypeError("Endless data have no chunks: take rows by `taker`")

    def first_row(self) -> pa.Table:
        return self._first_row

    @cached_property
    def _first_row(self) -> pa.Table:
        def read() -> pa.Table | None:
            return next((table.slice(0, 1) for table in _tables(self.data, 0) if table.num_rows), None)

        if (found := read_patiently(read, "the train data")) is None:
            raise _without_rows(0)
        return found

    def taker(
        self, *, seed: int, shuffle: bool = True, read_ahead: bool = True, ends: threading.Event | None = None
    ) -> EndlessTaker:
        """Return a reader of its rows."""
        return EndlessTaker(self.data, seed, shuffle, read_ahead, ends)


class EndlessTaker:
    """A `Taker` of rows that are read one after the other. The index of a row is its number in the order of reading."""

    def __init__(self, data: Endless, seed: int, shuffle: bool, read_ahead: bool, ends: threading.Event | None) -> None:
        """
        Args:
            data: the data.
            seed: seed of the run.
            shuffle: False: the order of reading.
            read_ahead: True to read the next window in the background.
            ends: same as in `WindowCache`.
        """
        self._data, self._seed, self._shuffle, self._reads_ahead = data, seed, shuffle, read_ahead
        self._ends = ends or STOP.get() or threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._windows: list[LoadedWindow] = []
        self._ahead: Future[LoadedWindow] | None = None
        self._reading = self._read_windows()

    def take(self, epoch: int, start: int, stop: int) -> tuple[pa.Table, Indices]:
        if self._windows and start < self._windows[0].window.first:
            self._await()
            self._begin_again()
        while not self._windows or _end_of(self._windows[-1]) < stop:
            window = self._next()
            needed = [one for one in self._windows if _end_of(one) > start]
            self._windows = [*(needed or self._windows[-1:]), window]  # a share may come again
        windows = enumerate(self._windows)
        holding = [index for index, one in windows if one.window.first < stop and _end_of(one) > start]
        return take_across(self._windows.__getitem__, holding, start, stop)

    def close(self) -> None:
        if self._pool is not None:
            self._ends.set()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._windows, self._ahead = [], None

    def _begin_again(self) -> None:
        self._windows, self._ahead, self._reading = [], None, self._read_windows()

    def _await(self) -> None:
        """Wait for the window that is being read, whatever becomes of it."""
        if self._ahead is not None and not self._ahead.cancel():
            self._ahead.exception()

    def _next(self) -> LoadedWindow:
        """Return the next window, and start to read the one after it."""
        if not self._reads_ahead:
            return next(self._reading)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "read-ahead", STOP.set, (self._ends,))
        ahead = self._ahead or self._pool.submit(next, self._reading)
        try:
            window = ahead.result()
        except BaseException:
            self._begin_again()  # the next request tries again
            raise
        self._ahead = self._pool.submit(next, self._reading)
        return window

    def _read_windows(self) -> Iterator[LoadedWindow]:
        """Read windows one after the other, without end."""
        first = index = 0
        for number in itertools.count():
            pieces: list[pa.Table] = []
            before, held = first, 0
            for table in itertools.chain(_again(self._data, number), [None]):
                if table is not None:
                    pieces.append(table)
                    held += table.num_rows
                if held >= self._data.window_rows or (table is None and held):
                    window = Window(index, first, held, (), self._seed, 0, self._shuffle)
                    order = window.permutation
                    yield LoadedWindow(window, Rows(pa.concat_tables(pieces)), order, first + order)
                    first, index, held, pieces = first + held, index + 1, 0, []
            if first == before:
                raise _without_rows(number)


def _end_of(window: LoadedWindow) -> int:
    return window.window.first + window.window.num_rows


def _tables(data: Endless, number: int) -> Iterator[pa.Table]:
    """Return the tables of a pass.

    Raises:
        TaskError: `read` returns something else, or the tables differ in their columns.
    """
    if not callable(data.read):
        raise TaskError(f"Endless(read): {_WANTED}, got a {_kind(data.read)}")
    found, first = data.read(number), None
    if isinstance(found, pa.Table | pa.RecordBatch) or not isinstance(found, Iterable):
        raise TaskError(f"Endless: {_WANTED}; its read({number}) returned a {_kind(found)}")
    for rows in found:
        if not isinstance(rows, pa.Table | pa.RecordBatch):
            raise TaskError(f"Endless: {_WANTED}; its read({number}) gave a {_kind(rows)} among them")
        first = first or rows.schema
        if rows.schema != first:
            raise TaskError(
                f"Endless: the columns of read({number}) change from {_shown(first)} to {_shown(rows.schema)}"
            )
        yield pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


def _kind(value: object) -> str:
    return type(value).__qualname__


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _again(data: Endless, number: int) -> Iterator[pa.Table]:
    """Return the tables of a pass; after an error that passes, read it again up to the table that failed."""
    num_read = 0
    tables = _tables(data, number)

    def read() -> pa.Table | None:
        nonlocal tables
        try:
            return next(tables, None)
        except Exception:
            tables = itertools.islice(_tables(data, number), num_read, None)
            raise

    while (table := read_patiently(read, "the train data", was_there=True)) is not None:
        num_read += 1
        yield table


def _without_rows(number: int) -> DataError:
    return DataError(
        f"the train data is empty: pass {number} of its Endless has no rows. Check what its read({number}) returns; an "
        "iterator can be used only once, so make a new one at each call."
    )


def endless_source(data: Endless, *, split: str | None, num_rows: int | None) -> EndlessSource:
    """Return the source of endless data.

    Args:
        data: the data.
        split: name of the split.
        num_rows: number of samples of the whole run; None: it is not known.

    Raises:
        ConfigError: they are for validation, or the run has no number of steps.
    """
    if split == "validation":
        raise ConfigError(
            "The task's dataset('validation') returned Endless data, and a validation needs an end: return a table, a "
            "dataset, or None"
        )
    if num_rows is None:
        raise ConfigError(
            "config: train.epochs: the train data is Endless, so an epoch has no end; give train.steps instead"
        )
    return EndlessSource(data, num_rows)

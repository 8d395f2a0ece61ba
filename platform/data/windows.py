"""The windows of an epoch, read one ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from orchestray.platform.data.arranging import Arranging
from orchestray.platform.data.order import EpochPlan, Indices, Window
from orchestray.platform.data.retries import STOP
from orchestray.platform.data.rows import Rows
from orchestray.platform.data.wide import plain

if TYPE_CHECKING:
    from orchestray.platform.data.source import Source


@dataclass(frozen=True)
class LoadedWindow:
    """A window in memory."""

    window: Window
    rows: Rows
    order: Indices
    """Rows in the order of use."""
    ids: Indices
    """Row of the dataset at each of its positions."""

    def take(self, start: int, stop: int) -> tuple[pa.Table, Indices]:
        """Return the rows of this window at the epoch's positions `start` to `stop`, and their dataset indices."""
        begin, end = max(start - self.window.first, 0), min(stop - self.window.first, self.window.num_rows)
        return self.rows.take(self.order[begin:end]), self.ids[begin:end]


class WindowReader:
    """A reader of windows in a thread, one ahead; at most two are in memory, the one in use and the one being read."""

    def __init__(self, source: Source, plan: EpochPlan, needed: Iterable[int]) -> None:
        """Prepare the reader; nothing is read before the context is entered.

        Args:
            source: source to read.
            plan: order of the epoch.
            needed: indices of the windows that will be used, in ascending order.
        """
        self._source = source
        self._plan = plan
        self._needed = iter(needed)
        self._current: LoadedWindow | None = None
        self._ahead: Future[LoadedWindow] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._stop = STOP.get() or threading.Event()  # one event ends the waits of both threads
        if len(self._plan.windows) > 1:
            self._pool = ThreadPoolExecutor(1, "read-ahead", STOP.set, (self._stop,))
            self._read_ahead()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._current = self._ahead = None
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, start: int, stop: int) -> tuple[pa.Table, Indices]:
        """Return the rows at positions `start` to `stop` (at least one) of the epoch, and their dataset indices."""
        return take_across(self._window, self._plan.windows_between(start, stop), start, stop)

    def _window(self, index: int) -> LoadedWindow:
        if self._current is None or self._current.window.index != index:
            self._current = None  # released before another window is read
            if self._ahead is None:
                self._current = self._load(index)
            else:
                self._current = self._ahead.result()
                self._read_ahead()
        return self._current

    def _read_ahead(self) -> None:
        assert self._pool is not None
        index = next(self._needed, None)
        self._ahead = None if index is None else self._pool.submit(self._load, index)

    def _load(self, index: int) -> LoadedWindow:
        return load_window(self._source, self._plan, index)


def load_window(source: Source, plan: EpochPlan, index: int) -> LoadedWindow:
    """Read a window of an epoch."""
    window = plan.windows[index]
    rows, order = source.read(window.chunks), window.permutation
    if window.shuffle and isinstance(source, Arranging):
        order = source.arrange(rows, order)
    return LoadedWindow(window, rows, order, plan.sample_ids(window, order))


def take_across(
    window_of: Callable[[int], LoadedWindow], indices: Iterable[int], start: int, stop: int
) -> tuple[pa.Table, Indices]:
    """Return the rows at positions `start` to `stop` of an epoch, taken from the windows one at a time."""
    pieces = [window_of(index).take(start, stop) for index in indices]
    if len(pieces) == 1:
        return pieces[0]
    tables, ids = zip(*pieces, strict=True)
    return pa.concat_tables(map(plain, tables)).combine_chunks(), np.concatenate(ids)

"""Rows of any epoch by position: the windows they are in are read when they are needed, and one ahead."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from orchestray.platform.data.order import EpochPlan, Indices
from orchestray.platform.data.retries import STOP
from orchestray.platform.data.windows import LoadedWindow, load_window, take_across

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestray.platform.data.source import Source

_KEPT = 2
"""Largest number of windows in memory, and of epochs whose order is known."""


class Taker(Protocol):
    """A reader of rows of any epoch."""

    def take(self, epoch: int, start: int, stop: int) -> tuple[pa.Table, Indices]:
        """Return the rows at positions `start` to `stop` (at least one) of an epoch, and their indices."""
        ...

    def close(self) -> None:
        """End the threads and release the memory. May be called again."""
        ...


class WindowCache:
    """A `Taker` of a source: at most two windows are in memory.

    They are the one in use and the one before it or, read ahead, the one after it. One thread at a time may use it.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int = 0,
        shuffle: bool = True,
        read_ahead: bool = True,
        ends: threading.Event | None = None,
    ) -> None:
        """Prepare the reader; nothing is read yet.

        Args:
            source: source of the rows.
            seed: seed of their order.
            shuffle: False: the dataset's own order.
            read_ahead: load the window after the latest one in the background, if there are several.
            ends: once set, no thread waits before a read that failed is tried again.
        """
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._read_ahead = read_ahead
        self._ends = ends or STOP.get() or threading.Event()
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], Future[LoadedWindow]] = OrderedDict()
        """Windows by epoch and index, the last used one at the end."""
        self._latest = (-1, -1)
        """Epoch and index of the furthest window that was requested."""
        self._loading: ThreadPoolExecutor | None = None

    def take(self, epoch: int, start: int, stop: int) -> tuple[pa.Table, Indices]:
        plan = self._plan(epoch)
        return take_across(partial(self._window, plan, epoch), plan.windows_between(start, stop), start, stop)

    def close(self) -> None:
        if self._loading is not None:
            self._ends.set()
            self._loading.shutdown(wait=True, cancel_futures=True)
        self._loading = None
        self._windows.clear()
        self._plans.clear()

    def _plan(self, epoch: int) -> EpochPlan:
        plan = self._plans.pop(epoch, None) or EpochPlan(
            self._source.chunk_rows,
            window_rows=self._source.window_rows,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )
        self._plans[epoch] = plan
        while len(self._plans) > _KEPT:
            self._plans.popitem(last=False)
        return plan

    def _window(self, plan: EpochPlan, epoch: int, index: int) -> LoadedWindow:
        key = (epoch, index)
        if key not in self._windows:
            self._load(plan, key)
        try:
            window = self._windows[key].result()
        except BaseException:
            del self._windows[key]  # the next request tries again
            raise
        self._windows.move_to_end(key)
        if key >= self._latest:
            self._latest = key
            ahead = (epoch, index + 1)
            if self._read_ahead and ahead[1] < len(plan.windows) and ahead not in self._windows:
                self._load(plan, ahead)
                self._windows.move_to_end(key)
        return window

    def _load(self, plan: EpochPlan, key: tuple[int, int]) -> None:
        """Start to read a window, after dropping the least recently used one."""
        while len(self._windows) >= _KEPT:
            self._windows.popitem(last=False)[1].cancel()
        if len(plan.windows) == 1:
            whole: Future[LoadedWindow] = Future()
            whole.set_result(load_window(self._source, plan, key[1]))
            self._windows[key] = whole
            return
        if self._loading is None:
            self._loading = ThreadPoolExecutor(1, "read-ahead", STOP.set, (self._ends,))
        self._windows[key] = self._loading.submit(load_window, self._source, plan, key[1])


@runtime_checkable
class OwnOrder(Protocol):
    """A source with an order of its own, which is not that of chunks and windows."""

    def taker(
        self, *, seed: int, shuffle: bool = True, read_ahead: bool = True, ends: threading.Event | None = None
    ) -> Taker:
        """Return a reader of its rows; same arguments as for `WindowCache`."""
        ...


def taker_of(
    source: Source, *, seed: int, shuffle: bool = True, read_ahead: bool = True, ends: threading.Event | None = None
) -> Taker:
    """Return a reader of a source's rows by position; same arguments as for `WindowCache`."""
    make = source.taker if isinstance(source, OwnOrder) else partial(WindowCache, source)
    return make(seed=seed, shuffle=shuffle, read_ahead=read_ahead, ends=ends)

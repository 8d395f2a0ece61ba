"""Shares read on request, for workers that receive the samples to compute instead of a rank.

`SampleStream` walks through an epoch. Here any share of any epoch can be requested, even an earlier one of another
worker. The same share has the same bits in both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import pyarrow as pa

from orchestray.platform.data.order import EpochPlan, Indices
from orchestray.platform.data.retries import STOP
from orchestray.platform.data.source import Source
from orchestray.platform.data.stream import Converter, Share, ToTrainingBatch, cut_micro_batches, halves_of
from orchestray.platform.data.windows import LoadedWindow, load_window, take_across
from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

_PREPARED = 4
"""Largest number of prepared shares; the oldest one that was never requested makes room for later ones."""
_KEPT = 2
"""Largest number of windows in memory, and of epochs whose order is known."""

_Key: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]


class ShareOrder(Protocol):
    """A request for samples."""

    @property
    def epoch(self) -> int: ...

    @property
    def step_in_epoch(self) -> int: ...

    @property
    def pieces(self) -> Sequence[tuple[int, int]]:
        """Positions (start, stop) in the epoch of each micro-batch's part; none is empty."""
        ...

    @property
    def batch_samples(self) -> int: ...

    @property
    def num_micro_batches(self) -> int: ...


class ShareReader:
    """A reader of shares in any order, one after the other; it can prepare the next ones in a thread of its own.

    At most two windows are in memory: the one in use and the one before it or, read ahead, the one after it. It is a
    context manager: leaving it ends the threads. One thread at a time may use it.
    """

    def __init__(
        self,
        source: Source,
        to_batch: Callable[[pa.Table], Batch],
        *,
        to_training_batch: ToTrainingBatch | None = None,
        seed: int = 0,
        shuffle: bool = True,
        read_ahead: bool = True,
    ) -> None:
        """Prepare the reader; nothing is read yet.

        Args:
            source: source of the samples.
            to_batch: turns rows into tensors (a method of the task); same as in `SampleStream`.
            to_training_batch: same as in `SampleStream`.
            seed: seed of the run.
            shuffle: False: the dataset's own order.
            read_ahead: load the window after the latest one in the background, if there are several.
        """
        self._source = source
        self._convert = Converter(to_batch, to_training_batch, seed)
        self._seed = seed
        self._shuffle = shuffle
        self._read_ahead = read_ahead
        self._lock = threading.Lock()
        """Lock of windows and plans, held while a share is assembled."""
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], Future[LoadedWindow]] = OrderedDict()
        """Windows by epoch and index, the last used one at the end."""
        self._latest = (-1, -1)
        """Epoch and index of the furthest window that was requested."""
        self._prepared: OrderedDict[_Key, Future[Share]] = OrderedDict()
        self._preparing: ThreadPoolExecutor | None = None
        self._loading: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and release the memory. May be called again."""
        self._closed.set()
        for pool in (self._preparing, self._loading):  # in this order: preparing waits for loading
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self._preparing = self._loading = None
        self._prepared.clear()
        self._windows.clear()
        self._plans.clear()

    def read(self, order: ShareOrder) -> Share:
        """Return the share that an order requests.

        Raises:
            DataError: a file cannot be read. Exceptions of `to_batch` are raised unchanged, even for a prepared order.
        """
        self._check_open()
        prepared = self._prepared.pop(_key(order), None)
        share = self._assemble(order) if prepared is None else prepared.result()
        PULSE.beats += 1
        PULSE.shares += 1
        return share

    def prepare(self, order: ShareOrder) -> None:
        """Start to read a share that `read` will be called for soon; return at once."""
        self._check_open()
        key = _key(order)
        if key in self._prepared:
            return
        if self._preparing is None:
            self._preparing = self._thread("prepare-shares")
        while len(self._prepared) >= _PREPARED:
            self._prepared.popitem(last=False)[1].cancel()
        self._prepared[key] = self._preparing.submit(self._assemble, order)

    def _assemble(self, order: ShareOrder) -> Share:
        with self._lock:
            plan = self._plan(order.epoch)
            take = partial(self._take, plan, order.epoch)
            convert = partial(self._convert, epoch=order.epoch)
            is_first = order.epoch == order.step_in_epoch == 0
            halves = halves_of(order.pieces[0], take, convert) if is_first and order.pieces else ()
            micro_batches = cut_micro_batches(order.pieces, take, convert)
        return Share(order.step_in_epoch, order.batch_samples, micro_batches, order.num_micro_batches, halves=halves)

    def _take(self, plan: EpochPlan, epoch: int, start: int, stop: int) -> tuple[pa.Table, Indices]:
        return take_across(partial(self._window, plan, epoch), plan.windows_between(start, stop), start, stop)

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
            self._loading = self._thread("read-ahead")
        self._windows[key] = self._loading.submit(load_window, self._source, plan, key[1])

    def _thread(self, name: str) -> ThreadPoolExecutor:
        """Return a thread whose waits for files end when this reader closes."""
        return ThreadPoolExecutor(1, name, STOP.set, (self._closed,))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError("the reader is closed")


def _key(order: ShareOrder) -> _Key:
    return order.epoch, order.step_in_epoch, tuple((start, stop) for start, stop in order.pieces)

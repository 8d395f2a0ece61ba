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

from orchestray.platform.data.retries import STOP
from orchestray.platform.data.source import Source
from orchestray.platform.data.stream import Converter, Share, ToTrainingBatch, bounds_of, cut_at, cut_micro_batches
from orchestray.platform.data.window_cache import taker_of
from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

_PREPARED = 4
"""Largest number of prepared shares; the oldest one that was never requested makes room for later ones."""

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
        cuts_first: bool = False,
    ) -> None:
        """Prepare the reader; nothing is read yet.

        Args:
            source: source of the samples.
            to_batch: turns rows into tensors (a method of the task); same as in `SampleStream`.
            to_training_batch: same as in `SampleStream`.
            seed: seed of the run.
            shuffle: False: the dataset's own order.
            read_ahead: load the window after the latest one in the background, if there are several.
            cuts_first: True if the first share is to have a `Share.cut`, if it can.
        """
        self._to_be_cut = cuts_first
        self._convert = Converter(to_batch, to_training_batch, seed)
        self._closed = threading.Event()
        self._rows = taker_of(source, seed=seed, shuffle=shuffle, read_ahead=read_ahead, ends=self._closed)
        self._lock = threading.Lock()
        """Lock of the rows, held while a share is assembled."""
        self._prepared: OrderedDict[_Key, Future[Share]] = OrderedDict()
        self._preparing: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and release the memory. May be called again."""
        self._closed.set()
        if self._preparing is not None:
            self._preparing.shutdown(wait=True, cancel_futures=True)
            self._preparing = None
        self._prepared.clear()
        self._rows.close()

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
            self._preparing = ThreadPoolExecutor(1, "prepare-shares", STOP.set, (self._closed,))
        while len(self._prepared) >= _PREPARED:
            self._prepared.popitem(last=False)[1].cancel()
        self._prepared[key] = self._preparing.submit(self._assemble, order)

    def _assemble(self, order: ShareOrder) -> Share:
        with self._lock:
            take = partial(self._rows.take, order.epoch)
            convert = partial(self._convert, epoch=order.epoch)
            bounds: Sequence[int] = ()
            if self._to_be_cut and order.pieces:
                # An order does not tell where its batch begins, but for the first of an epoch.
                bounds = bounds_of(order.pieces[0], (0, 0 if order.step_in_epoch else order.batch_samples))
                self._to_be_cut = not bounds
            cut = cut_at(bounds, order.pieces, take, convert)
            micro_batches = cut_micro_batches(order.pieces, take, convert)
        return Share(order.step_in_epoch, order.batch_samples, micro_batches, order.num_micro_batches, cut=cut)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError("the reader is closed")


def _key(order: ShareOrder) -> _Key:
    return order.epoch, order.step_in_epoch, tuple((start, stop) for start, stop in order.pieces)

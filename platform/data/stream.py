"""The samples of a split as one replica sees them: its share of every batch, made ready in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.platform.data.order import share_bounds
from orchestray.platform.data.source import Rows, Source

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a share."""

    batch: dict[str, Tensor]
    num_samples: int
    sample_ids: NDArray[np.int64]
    """Row index of each sample in the whole data."""


@dataclass(frozen=True)
class Share:
    """What one replica has of one batch."""

    step_in_epoch: int
    """Counted from 0."""
    batch_samples: int
    """Samples of the whole batch."""
    micro_batches: list[MicroBatch]
    """Empty if the batch has fewer samples than there are replicas, and this one gets none."""


class SampleStream:
    """The shares of one replica, epoch by epoch.

    Every sample is in exactly one share of an epoch, whatever the number of replicas; where an epoch's order comes from
    is `order.py`.
    """

    def __init__(
        self,
        source: Source,
        to_batch: Callable[[pa.Table], dict[str, Tensor]],
        *,
        batch_size: int,
        rank: int = 0,
        num_replicas: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
    ) -> None:
        """Describe the stream; nothing is read yet.

        Args:
            source: the rows.
            to_batch: the task's; called in the background thread.
            batch_size: samples of a whole batch.
            rank: which share, of `num_replicas`.
            num_replicas: shares of a batch.
            accumulate: micro-batches of a share; their sizes differ by at most one.
            seed: of the run.
            shuffle: False: in the order of the data.
            prefetch: shares made ready ahead.
        """
        self.source = source
        self.batch_size = batch_size
        self.num_samples = source.num_rows
        self.steps_per_epoch = -(-source.num_rows // batch_size)
        self._to_batch = to_batch
        self._rank, self._num_replicas, self._accumulate = rank, num_replicas, accumulate
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch

    @contextlib.contextmanager
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Iterator[Share]]:
        """The shares of an epoch (counted from 0) from `start_step` on. Leaving the context ends the background thread."""
        ready: queue.Queue[Share | BaseException | None] = queue.Queue(self._prefetch)
        left = threading.Event()

        def offer(item: Share | BaseException | None) -> None:
            while not left.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.5)
                    return

        def work() -> None:
            try:
                for share in self._shares(epoch, start_step):
                    offer(share)
                    if left.is_set():
                        return
                offer(None)
            except BaseException as error:  # noqa: BLE001 - raised in the consumer's thread
                offer(error)

        def shares() -> Iterator[Share]:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item

        thread = threading.Thread(target=work, name="prefetch", daemon=True)
        thread.start()
        try:
            yield shares()
        finally:
            left.set()
            with contextlib.suppress(queue.Empty):
                while True:
                    ready.get_nowait()
            thread.join()

    def empty_batch(self) -> dict[str, Tensor]:
        """A batch of no samples, with the dtypes and shapes of a real one."""
        window = next(self.source.windows(seed=self._seed, epoch=0, shuffle=False))
        rows = self.source.read(window)
        return {name: value[:0] for name, value in self._to_batch(rows.table.slice(0, 1)).items()}

    def _shares(self, epoch: int, start_step: int) -> Iterator[Share]:
        """The shares, reading each window when its first batch comes; a batch may span windows."""
        windows = self.source.windows(seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        held: list[tuple[int, NDArray[np.int64] | None, Rows]] = []
        step = start_step
        end = 0
        for window in windows:
            end = window.first + window.num_rows
            if end <= start_step * self.batch_size:
                continue
            held.append((window.first, window.permutation, self.source.read(window)))
            while (step + 1) * self.batch_size <= end or (end == self.num_samples and step < self.steps_per_epoch):
                yield self._share(step, held)
                step += 1
            held = [part for part in held if part[0] + part[2].table.num_rows > step * self.batch_size]

    def _share(self, step: int, held: list[tuple[int, NDArray[np.int64] | None, Rows]]) -> Share:
        first = step * self.batch_size
        batch_samples = min(self.batch_size, self.num_samples - first)
        start, stop = share_bounds(batch_samples, self._num_replicas)[self._rank]
        micro_batches = [
            self._micro_batch(first + start + a, first + start + b, held)
            for a, b in share_bounds(stop - start, self._accumulate)
            if b > a
        ]
        return Share(step, batch_samples, micro_batches)

    def _micro_batch(self, start: int, stop: int, held: list[tuple[int, Any, Rows]]) -> MicroBatch:
        tables, ids = [], []
        for first, permutation, rows in held:
            a, b = max(0, start - first), min(rows.table.num_rows, stop - first)
            if a >= b:
                continue
            if permutation is None:
                tables.append(rows.table.slice(a, b - a))
                ids.append(rows.sample_ids[a:b])
            else:
                chosen = permutation[a:b]
                tables.append(rows.table.take(chosen))
                ids.append(rows.sample_ids[chosen])
        import pyarrow as pa

        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        return MicroBatch(self._to_batch(table), stop - start, np.concatenate(ids))

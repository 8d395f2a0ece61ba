"""The order of samples in an epoch, and their division among replicas; pure arithmetic, without any data.

Data comes in chunks (the row groups of Parquet files; one chunk for a table in memory). An epoch shuffles the chunks,
cuts their sequence into windows that fit in memory, and shuffles the rows of each window. All of it depends on the seed
and the epoch alone. Any number of workers, a restart, and a resume thus see the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import DataError

Indices = NDArray[np.int64]

_CHUNKS, _ROWS = 0, 1


@dataclass(frozen=True)
class Window:
    """A window: consecutive chunks of a shuffled epoch, held in memory together."""

    index: int
    first: int
    """Position of its first row in the epoch."""
    num_rows: int
    chunks: tuple[int, ...]
    seed: int
    epoch: int
    shuffle: bool

    @cached_property
    def permutation(self) -> Indices:
        """Rows of the window in the order of use: indices into its concatenated chunks."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return random_permutation(self.num_rows, self.seed, self.epoch, _ROWS, self.index)


def windows(
    chunk_rows: Sequence[int], *, window_rows: int, seed: int, epoch: int, shuffle: bool = True
) -> Iterator[Window]:
    """Yield the order of one epoch over chunks of `chunk_rows` rows each, as windows.

    Args:
        chunk_rows: rows of each chunk, in the dataset's order; each at least 1.
        window_rows: a window takes chunks until it has this many rows (the last one may have fewer).
        seed: seed of the run, at least 0.
        epoch: number of the epoch, at least 0.
        shuffle: False: the dataset's own order.
    """
    order = random_permutation(len(chunk_rows), seed, epoch, _CHUNKS, 0) if shuffle else np.arange(len(chunk_rows))
    chunks: list[int] = []
    index = first = rows = 0
    for number, chunk in enumerate(order.tolist(), start=1):
        chunks.append(chunk)
        rows += chunk_rows[chunk]
        if rows >= window_rows or number == len(chunk_rows):
            yield Window(index, first, rows, tuple(chunks), seed, epoch, shuffle)
            index, first, rows, chunks = index + 1, first + rows, 0, []


class EpochPlan:
    """The plan of one epoch: its windows, and the position of each sample in them."""

    def __init__(
        self, chunk_rows: Sequence[int], *, window_rows: int, seed: int, epoch: int, shuffle: bool = True
    ) -> None:
        """Plan an epoch.

        Args:
            chunk_rows: same as in `windows`.
            window_rows: same as in `windows`.
            seed: same as in `windows`.
            epoch: same as in `windows`.
            shuffle: same as in `windows`.
        """
        self.windows = tuple(windows(chunk_rows, window_rows=window_rows, seed=seed, epoch=epoch, shuffle=shuffle))
        self._chunk_starts = np.concatenate([[0], np.cumsum(chunk_rows, dtype=np.int64)])
        self._firsts = [window.first for window in self.windows]

    def sample_ids(self, window: Window, order: Indices) -> Indices:
        """Return the samples of a window in the order of use, as row indices of the dataset.

        Args:
            window: the window.
            order: its rows in the order of use.
        """
        starts = self._chunk_starts
        spans = [np.arange(starts[chunk], starts[chunk + 1]) for chunk in window.chunks]
        stored = spans[0] if len(spans) == 1 else np.concatenate(spans)
        return stored[order]

    def windows_between(self, start: int, stop: int) -> range:
        """Return the indices of the windows that hold the positions from `start` up to, not including, `stop`."""
        if start >= stop:
            return range(0)
        return range(bisect_right(self._firsts, start) - 1, bisect_right(self._firsts, stop - 1))


def window_order(window_rows: Sequence[int], *, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    """Return the order of all sample ids in an epoch over data whose chunks are windows of their own.

    A table in memory is a single window: `window_order([num_rows], seed=0, epoch=3)`.
    """
    plan = EpochPlan(window_rows, window_rows=1, seed=seed, epoch=epoch, shuffle=shuffle)
    return np.concatenate([plan.sample_ids(window, window.permutation) for window in plan.windows])


def share_pieces(
    first: int, num_samples: int, *, accumulate: int, num_shares: int, share: int
) -> list[tuple[int, int]]:
    """Return the positions (start, stop) of one share's part of each micro-batch of a batch, without empty parts.

    The batch is cut into micro-batches first, and each of them into shares. So the samples of a micro-batch do not
    depend on the number of shares.

    Args:
        first: position of the batch's first sample.
        num_samples: samples of the batch.
        accumulate: micro-batches of the batch.
        num_shares: parts of each micro-batch.
        share: index of the share, from 0.
    """
    pieces = []
    for start, stop in split_evenly(num_samples, accumulate):
        a, b = split_evenly(stop - start, num_shares)[share]
        if a < b:
            pieces.append((first + start + a, first + start + b))
    return pieces


def used_samples(num_rows: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of samples of an epoch.

    Args:
        num_rows: samples of the data.
        batch_size: samples of a batch.
        drop_last: leave out the last batch of an epoch if it is short.

    Raises:
        DataError: then there is none.
    """
    if not drop_last:
        return num_rows
    if num_rows < batch_size:
        raise DataError(
            f"the data has {num_rows} samples, fewer than one batch of {batch_size} (train.batch_size), and "
            "train.drop_last leaves short batches out: set it to false, or choose a smaller batch"
        )
    return num_rows // batch_size * batch_size


def split_rows(num_rows: int, validation_fraction: float) -> tuple[Indices, Indices]:
    """Draw rows for validation and for training, at random but always the same; one of each if there are two rows."""
    size = min(max(round(num_rows * validation_fraction), 1), num_rows - 1) if num_rows > 1 else 0
    order = random_permutation(num_rows, 0, 0, _ROWS, 0)
    return order[:size], order[size:]


def random_permutation(length: int, seed: int, epoch: int, *purpose: int) -> Indices:
    """Return a random permutation of a length, by the seed, the epoch and numbers for what it is drawn.

    It is stable across numpy versions: it sorts raw random bits instead of shuffling. The spawn key distinguishes
    seeds that a plain list would confuse: [seed, 1] and [seed, 1, 0] seed alike.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, *purpose)))
    return np.argsort(bits.random_raw(length), kind="stable")

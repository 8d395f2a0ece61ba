"""The stream of batches of one replica: its share of each, as tensors, prepared in the background."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from orchestray.platform.data.order import EpochPlan, Indices, share_pieces
from orchestray.platform.data.prefetch import Prefetch
from orchestray.platform.data.source import Source
from orchestray.platform.data.tensors import ColumnError
from orchestray.platform.data.windows import WindowReader

if TYPE_CHECKING:
    from orchestray.platform.task import Batch


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one call of the model."""

    batch: Batch
    num_samples: int
    sample_ids: Indices
    """Row of each sample in the dataset, [num_samples]."""


@dataclass(frozen=True)
class Share:
    """One replica's part of one batch."""

    step_in_epoch: int
    """Number of the batch in the epoch, from 0."""
    batch_samples: int
    """Samples of the whole batch, over all replicas."""
    micro_batches: tuple[MicroBatch, ...]
    """Parts of the micro-batches, none empty: a replica without samples of one has none of later ones either."""
    num_micro_batches: int
    """Micro-batches of the whole batch, the same on every replica."""

    @cached_property
    def num_samples(self) -> int:
        """Number of samples of this part."""
        return sum(micro_batch.num_samples for micro_batch in self.micro_batches)


class SampleStream:
    """A stream that cuts epochs into batches, batches into micro-batches, and those into a part per replica.

    Every sample is used exactly once per epoch over all replicas, including the last short batch. The samples of a
    batch and of a micro-batch depend on the seed and the epoch alone. So results over a whole micro-batch (batch
    normalisation) do not depend on the number of replicas. Sizes differ by at most one.
    """

    def __init__(
        self,
        source: Source,
        to_batch: Callable[[pa.Table], Batch],
        *,
        batch_size: int,
        rank: int = 0,
        num_replicas: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
    ) -> None:
        """Prepare the stream; nothing is read yet.

        Args:
            source: source of the samples.
            to_batch: turns rows into tensors (a method of the task). It must depend on the rows alone: it runs in a
                background thread, where random numbers would come in no fixed order. It may overwrite the rows' memory.
            batch_size: samples of a batch, over all replicas.
            rank: rank of this replica, from 0.
            num_replicas: number of replicas that share a batch.
            accumulate: micro-batches of a batch.
            seed: seed of the run.
            shuffle: False: the dataset's own order.
            prefetch: number of shares prepared in advance.
        """
        self._source = source
        self._to_batch = to_batch
        self.batch_size = batch_size
        self.num_samples = source.num_rows
        self._rank = rank
        self._num_replicas = num_replicas
        self._accumulate = accumulate
        self._seed = seed
        self._shuffle = shuffle
        self._prefetch = prefetch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last one may be short."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, epoch: int, start_step: int = 0) -> Prefetch[Share]:
        """Iterate over this replica's share of each batch of an epoch, in order, from batch `start_step` on.

        Returns:
            An iterator and context manager: leaving it ends the background thread. Exceptions of that thread (DataError
                for a file that cannot be read, whatever `to_batch` raises) are raised by the iteration.
        """
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step must be from 0 to {self.steps_per_epoch}, got {start_step}")
        return Prefetch(self._shares(epoch, start_step), self._prefetch)

    def empty_batch(self) -> Batch:
        """Return a batch without samples, with the shapes and types of the others."""
        return {name: value[:0] if value.dim() else value for name, value in self._one_sample.items()}

    def one_sample(self) -> Batch:
        """Return a batch of the data's first sample; it belongs to the caller."""
        return {name: value.clone() for name, value in self._one_sample.items()}

    @cached_property
    def _one_sample(self) -> Batch:
        return convert(self._source.first_row(), self._to_batch)

    def _shares(self, epoch: int, start_step: int) -> Generator[Share, None, None]:
        plan = EpochPlan(
            self._source.chunk_rows,
            window_rows=self._source.window_rows,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )
        with WindowReader(self._source, plan, self._windows_needed(plan, start_step)) as reader:
            for step in range(start_step, self.steps_per_epoch):
                pieces = self._pieces(step)
                samples = self._batch_samples(step)
                micro_batches = cut_micro_batches(pieces, reader.take, self._to_batch)
                yield Share(step, samples, micro_batches, min(self._accumulate, samples))

    def _batch_samples(self, step: int) -> int:
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    def _pieces(self, step: int) -> list[tuple[int, int]]:
        """Return the positions (start, stop) in the epoch of this replica's part of each micro-batch of a batch."""
        return share_pieces(
            step * self.batch_size,
            self._batch_samples(step),
            accumulate=self._accumulate,
            num_shares=self._num_replicas,
            share=self._rank,
        )

    def _windows_needed(self, plan: EpochPlan, start_step: int) -> Iterator[int]:
        """Yield the windows in which this replica has samples, from step `start_step` on."""
        last = -1
        for step in range(start_step, self.steps_per_epoch):
            for piece in self._pieces(step):
                for index in plan.windows_between(*piece):
                    if index > last:
                        last = index
                        yield index


def cut_micro_batches(
    pieces: Sequence[tuple[int, int]],
    take: Callable[[int, int], tuple[pa.Table, Indices]],
    to_batch: Callable[[pa.Table], Batch],
) -> tuple[MicroBatch, ...]:
    """Return one micro-batch for each piece of an epoch.

    Args:
        pieces: positions (start, stop) in the epoch.
        take: returns the rows at such positions, and their indices in the dataset.
        to_batch: turns rows into tensors.
    """
    if len(pieces) < 2 or any(stop != start for (_, stop), (start, _) in pairwise(pieces)):
        taken = [take(start, stop) for start, stop in pieces]
        return tuple(MicroBatch(convert(rows, to_batch), len(ids), ids) for rows, ids in taken)
    first = pieces[0][0]  # adjacent pieces, as of a single replica, need only one take
    rows, ids = take(first, pieces[-1][1])
    bounds = [(start - first, stop - first) for start, stop in pieces]
    return tuple(MicroBatch(convert(rows.slice(a, b - a), to_batch), b - a, ids[a:b]) for a, b in bounds)


def convert(rows: pa.Table, to_batch: Callable[[pa.Table], Batch]) -> Batch:
    """Return `to_batch(rows)`; its errors name the column."""
    try:
        return to_batch(rows)
    except ColumnError as error:
        raise error.named_in(rows) from error.__cause__

"""The stream of batches as one replica sees it: its share of each, as tensors, prepared in the background."""

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
    """What the model is called with at once."""

    batch: Batch
    num_samples: int
    sample_ids: Indices
    """Of each sample its row in the dataset, [num_samples]."""


@dataclass(frozen=True)
class Share:
    """One replica's part of one batch."""

    step_in_epoch: int
    """0 for the epoch's first batch."""
    batch_samples: int
    """Samples of the whole batch, over all replicas."""
    micro_batches: tuple[MicroBatch, ...]
    """The share's part of each micro-batch of the batch, none of them empty: where a replica has no sample of a
    micro-batch it has none of the later ones either."""
    num_micro_batches: int
    """Micro-batches of the whole batch, the same on every replica."""


class SampleStream:
    """Cuts each epoch into batches, each batch into micro-batches, and each of those into a part a replica.

    Every sample is used exactly once an epoch over all replicas, the last short batch included. Which samples form
    which batch and which micro-batch depends on the seed and the epoch alone, so that what is computed over a whole
    micro-batch (batch normalisation) is the same whatever the number of replicas. Sizes differ by at most one.
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
        """Nothing is read yet.

        Args:
            source: the samples.
            to_batch: makes tensors of rows (the task's). It must depend on the rows alone: it runs in a thread beside
                the training, where random numbers would come in no fixed order. The rows' memory is its own.
            batch_size: samples of a batch, over all replicas.
            rank: of this replica, from 0.
            num_replicas: how many replicas share a batch.
            accumulate: micro-batches of a batch.
            seed: of the run.
            shuffle: False: the dataset's own order.
            prefetch: shares that are prepared in advance.
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
        """This replica's share of each batch of an epoch, in order, from batch `start_step` on.

        Returns:
            An iterator and context manager: leaving it ends the background thread. What is raised in there (DataError
            for a file that cannot be read, whatever `to_batch` raises) is raised by the iteration.
        """
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step must be from 0 to {self.steps_per_epoch}, got {start_step}")
        return Prefetch(self._shares(epoch, start_step), self._prefetch)

    def empty_batch(self) -> Batch:
        """A batch of no samples, of the shapes and types that the others have."""
        return {name: value[:0] if value.dim() else value for name, value in self._one_sample.items()}

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
        """Positions in the epoch, from and up to, of this replica's part of each micro-batch of a batch."""
        return share_pieces(
            step * self.batch_size,
            self._batch_samples(step),
            accumulate=self._accumulate,
            num_shares=self._num_replicas,
            share=self._rank,
        )

    def _windows_needed(self, plan: EpochPlan, start_step: int) -> Iterator[int]:
        """The windows that this replica has samples in, from a batch on; worked out as they are asked for."""
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
    """The samples at some pieces of an epoch, each piece a micro-batch.

    Args:
        pieces: positions from and up to.
        take: gives the rows at such positions, and their indices in the dataset.
        to_batch: makes tensors of rows.
    """
    if len(pieces) < 2 or any(stop != start for (_, stop), (start, _) in pairwise(pieces)):
        taken = [take(start, stop) for start, stop in pieces]
        return tuple(MicroBatch(convert(rows, to_batch), len(ids), ids) for rows, ids in taken)
    first = pieces[0][0]  # pieces that are neighbours, as those of a lone replica: one take serves them all
    rows, ids = take(first, pieces[-1][1])
    bounds = [(start - first, stop - first) for start, stop in pieces]
    return tuple(MicroBatch(convert(rows.slice(a, b - a), to_batch), b - a, ids[a:b]) for a, b in bounds)


def convert(rows: pa.Table, to_batch: Callable[[pa.Table], Batch]) -> Batch:
    """`to_batch(rows)`, whose errors name the column they are about."""
    try:
        return to_batch(rows)
    except ColumnError as error:
        raise error.named_in(rows) from error.__cause__

"""The stream of batches of one replica: its share of each, as tensors, prepared in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from orchestray.platform.data.draws import SampleDraws
from orchestray.platform.data.mark import mark_of
from orchestray.platform.data.nested import map_tensors
from orchestray.platform.data.order import EpochPlan, Indices, share_pieces, used_samples
from orchestray.platform.data.prefetch import Prefetch
from orchestray.platform.data.refilled import Refills
from orchestray.platform.data.source import Source
from orchestray.platform.data.tensors import ColumnError
from orchestray.platform.data.window_cache import OwnOrder
from orchestray.platform.data.windows import WindowReader
from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.platform.task import Batch


_MOST_ALONE = 8
"""Largest number of samples that are cut one by one."""

Take: TypeAlias = "Callable[[int, int], tuple[pa.Table, Indices]]"
Convert: TypeAlias = "Callable[[pa.Table, Indices], Batch]"
ToTrainingBatch: TypeAlias = "Callable[[pa.Table, Sequence[np.random.Generator]], Batch]"


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one call of the model."""

    batch: Batch
    num_samples: int
    sample_ids: Indices
    """Row of each sample in the dataset, [num_samples]."""
    own_weight: float | None = None
    """Weight that the task gives its loss; None: the number of samples."""
    weight: float = field(init=False)
    """Weight of its loss among those of the batch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", self.num_samples if self.own_weight is None else self.own_weight)


@dataclass(frozen=True)
class Cut:
    """Samples cut into parts, by which a loss can be compared with the one that they have at once."""

    parts: tuple[MicroBatch, ...]
    whole: MicroBatch | None = None
    """The samples at once; None: they are the share's first micro-batch."""


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
    batch_weight: float = 0.0
    """Weight of the whole batch, over all replicas; 0: its number of samples, which it becomes.

    Samples of weight w have the part w / batch_weight in the mean loss of the batch.
    """
    cut: Cut | None = None
    """Some samples of the batch cut into smaller parts, if that was asked for."""
    num_samples: int = field(init=False)
    """Number of samples of this part."""
    weight: float = field(init=False)
    """Weight of this part."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_weight", self.batch_weight or self.batch_samples)
        object.__setattr__(self, "num_samples", sum(each.num_samples for each in self.micro_batches))
        object.__setattr__(self, "weight", sum(each.weight for each in self.micro_batches))


class SampleStream:
    """A stream that cuts epochs into batches, batches into micro-batches, and those into a part per replica.

    Every sample is used exactly once per epoch over all replicas, including the last short batch unless that is
    dropped. The samples of a batch and of a micro-batch depend on the seed and the epoch alone. So results over a whole
    micro-batch (batch normalisation) do not depend on the number of replicas. Sizes differ by at most one.
    """

    def __init__(
        self,
        source: Source,
        to_batch: Callable[[pa.Table], Batch],
        *,
        to_training_batch: ToTrainingBatch | None = None,
        batch_size: int,
        rank: int = 0,
        num_replicas: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        weigh: Callable[[Batch], float] | None = None,
        drop_last: bool = False,
        pin: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Prepare the stream; nothing is read yet.

        Args:
            source: source of the samples.
            to_batch: turns rows into tensors (a method of the task). It must depend on the rows alone: it may run in a
                background thread, where random numbers would come in no fixed order. It may overwrite the rows' memory.
            to_training_batch: turns rows into tensors in its place, and changes them at random (a method that a task
                may have); None: it has none, or the samples are not for training.
            batch_size: samples of a batch, over all replicas.
            rank: rank of this replica, from 0.
            num_replicas: number of replicas that share a batch.
            accumulate: micro-batches of a batch.
            seed: seed of the run.
            shuffle: False: the dataset's own order.
            prefetch: number of shares prepared in advance.
            weigh: returns the weight of a batch's loss (a method of the task); default: its number of samples.
            drop_last: leave out the last batch of an epoch if it is short.
            pin: returns a tensor in memory from which a GPU copies beside its work. Called for each tensor of a batch,
                by the thread that reads; default: none is moved.

        Raises:
            DataError: without the short batch there is none.
        """
        self._source = source
        self._convert = Converter(to_batch, to_training_batch, seed)
        self.batch_size = batch_size
        self.num_samples = used_samples(source.num_rows, batch_size, drop_last=drop_last)
        """Samples of an epoch."""
        self._rank = rank
        self._num_replicas = num_replicas
        self._accumulate = accumulate
        self._seed = seed
        self._shuffle = shuffle
        self._prefetch = prefetch
        self._weigh = weigh
        self._pin = pin
        self._origin = 0
        """Position in the epoch of the first batch."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last one may be short."""
        return -(-(self.num_samples - self._origin) // self.batch_size)

    @property
    def can_resize(self) -> bool:
        """True if the order of the samples does not depend on the size of the batches."""
        return not isinstance(self._source, OwnOrder)

    def resized(self, batch_size: int, origin: int) -> SampleStream:
        """Return a stream of the same epochs, each from position `origin` on, in batches of another size."""
        if (batch_size, origin) == (self.batch_size, self._origin):
            return self
        stream = copy.copy(self)
        stream.batch_size, stream._origin = batch_size, origin
        return stream

    def epoch(self, epoch: int, start_step: int = 0, *, cuts_first: bool = False) -> Prefetch[Share]:
        """Iterate over this replica's share of each batch of an epoch, in order, from batch `start_step` on.

        Args:
            epoch: number of the epoch.
            start_step: number of the first batch.
            cuts_first: True if the first share is to have a `Share.cut`, if it can.

        Returns:
            An iterator and context manager: leaving it ends the background thread. Exceptions of that thread (DataError
                for a file that cannot be read, whatever `to_batch` raises) are raised by the iteration.
        """
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step must be from 0 to {self.steps_per_epoch}, got {start_step}")
        # Nothing can be prepared beside the last share: a thread would only cost time.
        depth = max(1, self._prefetch) if self.steps_per_epoch - start_step > 1 else 0
        return Prefetch(self._shares(epoch, start_step, start_step if cuts_first else -1), depth)

    def mark(self) -> list[int]:
        """Return a mark of all samples, which is that of every worker that has the same data."""
        return mark_of(self._source)

    def one_sample(self) -> Batch:
        """Return a batch of the data's first sample; it belongs to the caller."""
        sample: Batch = map_tensors(torch.clone, self._first)
        return sample

    @cached_property
    def _first(self) -> Batch:
        return self._convert(self._source.first_row(), np.zeros(1, np.int64), 0)

    def _shares(self, epoch: int, start_step: int, step_to_cut: int) -> Generator[Share, None, None]:
        if isinstance(self._source, OwnOrder):
            with closing(self._source.taker(seed=self._seed, shuffle=self._shuffle)) as taker:
                yield from self._cut(epoch, start_step, step_to_cut, partial(taker.take, epoch))
            return
        plan = EpochPlan(
            self._source.chunk_rows,
            window_rows=self._source.window_rows,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )
        with WindowReader(self._source, plan, self._windows_needed(plan, start_step)) as reader:
            yield from self._cut(epoch, start_step, step_to_cut, reader.take, plan)

    def _cut(
        self, epoch: int, start_step: int, step_to_cut: int, take: Take, plan: EpochPlan | None = None
    ) -> Iterator[Share]:
        """Yield the shares of an epoch.

        Args:
            epoch: number of the epoch.
            start_step: number of the first batch.
            step_to_cut: number of the batch whose share has a `Share.cut`; -1: none has.
            take: returns rows.
            plan: windows of the epoch, if rows can be taken twice only within one of them.
        """
        convert = partial(self._convert, epoch=epoch)
        for step in range(start_step, self.steps_per_epoch):
            pieces = self._pieces(step)
            samples = self._batch_samples(step)
            bounds = self._bounds(step, pieces[0], plan) if pieces and step == step_to_cut else ()
            cut = cut_at(bounds, pieces, take, convert, self._weigh)
            micro_batches = cut_micro_batches(pieces, take, convert, self._weigh)
            if self._pin is not None:
                micro_batches = tuple(replace(each, batch=map_tensors(self._pin, each.batch)) for each in micro_batches)
            yield Share(step, samples, micro_batches, min(self._accumulate, samples), cut=cut)

    def _bounds(self, step: int, piece: tuple[int, int], plan: EpochPlan | None) -> Sequence[int]:
        """Return the result of `bounds_of` within the first window of this replica's first piece of a batch."""
        (start, stop), first = piece, self._batch_start(step)
        last = first + self._batch_samples(step)
        if plan is not None:
            window = plan.windows[plan.windows_between(start, stop)[0]]
            last = min(last, window.first + window.num_rows)
        # One replica is enough to look at the samples of others.
        return bounds_of((start, min(stop, last)), (first, last) if start == first else (start, start))

    def _batch_samples(self, step: int) -> int:
        return min(self.batch_size, self.num_samples - self._batch_start(step))

    def _batch_start(self, step: int) -> int:
        return self._origin + step * self.batch_size

    def _pieces(self, step: int) -> list[tuple[int, int]]:
        """Return the positions (start, stop) in the epoch of this replica's part of each micro-batch of a batch."""
        return share_pieces(
            self._batch_start(step),
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
    take: Take,
    convert: Convert,
    weigh: Callable[[Batch], float] | None = None,
) -> tuple[MicroBatch, ...]:
    """Return one micro-batch for each piece of an epoch.

    Args:
        pieces: positions (start, stop) in the epoch.
        take: returns the rows at such positions, and their indices in the dataset.
        convert: turns rows into tensors, given their indices in the dataset.
        weigh: returns the weight of a batch's loss; default: its number of samples.
    """
    if len(pieces) < 2 or any(stop != start for (_, stop), (start, _) in pairwise(pieces)):
        taken = [take(start, stop) for start, stop in pieces]
        return tuple(_micro_batch(rows, ids, convert, weigh) for rows, ids in taken)
    first = pieces[0][0]  # adjacent pieces, as of a single replica, need only one take
    rows, ids = take(first, pieces[-1][1])
    bounds = [(start - first, stop - first) for start, stop in pieces]
    return tuple(_micro_batch(rows.slice(a, b - a), ids[a:b], convert, weigh) for a, b in bounds)


def bounds_of(piece: tuple[int, int], others: tuple[int, int]) -> Sequence[int]:
    """Return the positions in an epoch at which to cut samples for `Share.cut`; empty if there are too few.

    The first piece of a share is cut into two parts, the first of an odd number of samples: the mean of the largest
    half of the losses may be the mean of those of two even parts. If it has only one sample, some others are cut one by
    one.

    Args:
        piece: position (start, stop) of the piece.
        others: position of samples of the batch.
    """
    start, stop = piece
    if stop - start > 1:
        return start, start + ((stop - start) // 2 | 1), stop
    start, stop = others
    return range(start, min(stop, start + _MOST_ALONE) + 1) if stop - start > 1 else ()


def cut_at(
    bounds: Sequence[int],
    pieces: Sequence[tuple[int, int]],
    take: Take,
    convert: Convert,
    weigh: Callable[[Batch], float] | None = None,
) -> Cut | None:
    """Return the samples between the first and the last of some positions, cut at the others; None without any.

    The other arguments are those of `cut_micro_batches`.
    """
    if not bounds:
        return None
    parts, ends = cut_micro_batches([*pairwise(bounds)], take, convert, weigh), (bounds[0], bounds[-1])
    return Cut(parts, None if ends == pieces[0] else cut_micro_batches([ends], take, convert, weigh)[0])


def _micro_batch(rows: pa.Table, ids: Indices, convert: Convert, weigh: Callable[[Batch], float] | None) -> MicroBatch:
    batch = convert(rows, ids)
    if weigh is None:
        return MicroBatch(batch, len(ids), ids)
    given = weigh(batch)
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError):  # not a number, or several
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise TrainingError(
            f"The task's weight(batch) returned {given} for a batch of {len(ids)} samples. Return the number that the "
            "loss of the batch is divided by: it is one, and never negative."
        )
    return MicroBatch(batch, len(ids), ids, weight)


class Converter:
    """A function from rows to a batch: a task's `to_batch`, or its `to_training_batch`. Its errors name the column."""

    def __init__(
        self, to_batch: Callable[[pa.Table], Batch], to_training_batch: ToTrainingBatch | None, seed: int
    ) -> None:
        """
        Args:
            to_batch: turns rows into tensors.
            to_training_batch: turns rows into tensors in its place, given a generator for each.
            seed: seed of the run.
        """
        self._to_batch, self._to_training_batch, self._seed = to_batch, to_training_batch, seed
        self._refills = Refills()

    def __call__(self, rows: pa.Table, ids: Indices, epoch: int) -> Batch:
        """Return rows as a batch.

        Args:
            rows: the rows.
            ids: their indices in the dataset.
            epoch: number of the epoch.
        """
        try:
            if self._to_training_batch is None:
                return self._refills(partial(self._to_batch, rows))
            draws = SampleDraws(ids, seed=self._seed, epoch=epoch)
            return self._refills(partial(self._to_training_batch, rows, draws))
        except ColumnError as error:
            raise error.named_in(rows) from error.__cause__

"""A split of the training data into one part for weights and one for the architecture, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from orchestray.platform.data.order import split_rows
from orchestray.platform.data.retries import read_patiently
from orchestray.platform.data.source import WINDOW_ROWS, Source, Streamed, open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import DataError, TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from orchestray.platform.data.rows import Rows
    from orchestray.platform.data.stream import Share, ToTrainingBatch
    from orchestray.platform.task import Batch, Task


class PartOfSource:
    """A source restricted to some chunks of another."""

    def __init__(self, whole: Source, chunks: Sequence[int]) -> None:
        self._whole, self._chunks = whole, tuple(chunks)

    @property
    def num_rows(self) -> int:
        return sum(self.chunk_rows)

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return tuple(self._whole.chunk_rows[chunk] for chunk in self._chunks)

    @property
    def window_rows(self) -> int:
        return self._whole.window_rows

    def read(self, chunks: Sequence[int]) -> Rows:
        return self._whole.read([self._chunks[chunk] for chunk in chunks])

    def first_row(self) -> pa.Table:
        return self._whole.first_row()


def two_parts(task: Task, architecture_part: float) -> tuple[Source, Source]:
    """Return the training data for the weights and that for the architecture, which share no sample.

    Of a table or a small dataset, rows are drawn. Of a large one, whole chunks are drawn, so that it need not fit in
    memory.

    Args:
        task: task that has the data.
        architecture_part: fraction of the data for the architecture.

    Raises:
        DataError: there is only one sample, or one chunk of a large dataset.
    """

    def read() -> tuple[pa.Table | ds.Dataset, int]:
        data, window_rows = task.dataset("train"), WINDOW_ROWS
        if isinstance(data, Streamed):
            data, window_rows = data.dataset, data.window_rows
        if not isinstance(data, pa.Table | ds.Dataset):
            raise TaskError(
                "search.architecture: a part of the training data is kept for the architecture, so the task's "
                f"dataset('train') must return a table or a dataset, got a {type(data).__qualname__}"
            )
        is_small = isinstance(data, ds.Dataset) and data.count_rows() <= window_rows
        return data.to_table() if is_small else data, window_rows

    data, window_rows = read_patiently(read, "the train data")
    if isinstance(data, ds.Dataset):
        return _parts_of_chunks(open_source(data, split="train", window_rows=window_rows), architecture_part)
    if data.num_rows < 2:
        raise DataError("the train data has a single row; a part for the architecture needs another")
    judged, trained = split_rows(data.num_rows, architecture_part)
    return tuple(open_source(data.take(np.sort(rows)), split="train") for rows in (trained, judged))  # type: ignore[return-value]


def _parts_of_chunks(whole: Source, architecture_part: float) -> tuple[Source, Source]:
    if len(whole.chunk_rows) < 2:
        raise DataError(
            "the train data is one large chunk, and a part for the architecture needs another: write it with "
            "row groups, or as several files"
        )
    judged, trained = split_rows(len(whole.chunk_rows), architecture_part)
    return PartOfSource(whole, sorted(trained.tolist())), PartOfSource(whole, sorted(judged.tolist()))


class Batches:
    """Batches of a part by number, from 0, over all epochs. A context manager: leaving it ends its thread."""

    def __init__(
        self,
        source: Source,
        to_batch: Callable[[pa.Table], Batch],
        *,
        to_training_batch: ToTrainingBatch | None = None,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Take the arguments of `SampleStream`."""
        self.stream = SampleStream(
            source,
            to_batch,
            to_training_batch=to_training_batch,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._open = ExitStack()
        self._shares: Iterator[Share] = iter(())
        self._next: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._next = None

    @property
    def steps_per_epoch(self) -> int:
        return self.stream.steps_per_epoch

    def at(self, number: int) -> Batch:
        """Return a batch by its number; consecutive numbers are cheap."""
        epoch, index = divmod(number, self.steps_per_epoch)
        if number != self._next or index == 0:
            self._open.close()
            self._shares = iter(self._open.enter_context(self.stream.epoch(epoch, start_step=index)))
        self._next = number + 1
        return next(self._shares).micro_batches[0].batch

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of one epoch, each with its number of samples."""
        with self.stream.epoch(0) as shares:
            for share in shares:
                for part in share.micro_batches:
                    yield part.batch, part.num_samples

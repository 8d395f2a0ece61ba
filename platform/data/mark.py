"""A mark of data, by which workers tell that they have the same rows in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from orchestray.platform.data.retries import READS
from orchestray.platform.data.source import TableSource
from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from orchestray.platform.data.source import Source

_MOST_ROWS = 8


def mark_of(source: Source) -> list[int]:
    """Return the number of rows, and a checksum of a few of them: of data that are read in parts, the first alone."""
    if not source.num_rows:
        return [0, 0]
    if isinstance(source, TableSource):
        rows = _shown(source, np.linspace(0, source.num_rows - 1, _MOST_ROWS).astype(np.int64))
    else:
        rows = repr(source.first_row().to_pylist())
    return [source.num_rows, crc32(rows.encode(errors="replace"))]


def warn_of_shared_rows(train: Source, validation: Source) -> None:
    """Warn if data in memory begin with the same rows, as those do that `dataset` draws at random for each split."""
    num_rows = min(_MOST_ROWS, train.num_rows, validation.num_rows)
    if not (num_rows and isinstance(train, TableSource) and isinstance(validation, TableSource)):
        return
    if _shown(train, np.arange(num_rows)) == _shown(validation, np.arange(num_rows)):
        READS.warn(
            "the validation data begin with the same rows as the training data, so that this run validates on samples "
            "that it trains on. Unseeded random numbers are the same in every call of dataset(split), which keeps sets "
            "apart that are divided at random. Data that are drawn need a generator for each split, such as "
            "numpy.random.default_rng(1 if split == 'train' else 2)"
        )


def _shown(source: TableSource, rows: npt.NDArray[np.int64]) -> str:
    return repr(source.read([0]).take(rows).to_pylist())


def refuse_other_marks(
    worker: int, found: Mapping[str, Sequence[int]], first_worker: int, first: Mapping[str, Sequence[int]]
) -> None:
    """Compare the marks of the data of two workers, by split.

    Raises:
        TrainingError: they have other rows, or the same ones in another order.
    """
    for split, (rows, mark) in found.items():
        first_rows, first_mark = first[split]
        if (rows, mark) == (first_rows, first_mark):
            continue
        how = f"{rows} and {first_rows} rows" if rows != first_rows else "as many rows, but others or in another order"
        raise TrainingError(
            f"Workers {worker} and {first_worker} have not the same {split} data: {how}. dataset('{split}') must "
            "return the same rows in the same order on every worker. Sort the names of files that it lists, and give "
            "generators a seed, as in numpy.random.default_rng(0)."
        )

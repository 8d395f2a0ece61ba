"""Where a worker stands in a pipeline: all that its program depends on, besides the number of micro-batches."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A worker's."""

    worker: int
    """From 0."""
    num_workers: int
    """Of the pipeline."""
    stages: tuple[int, ...]
    """That it holds, in the order data passes them."""

    @property
    def num_hops(self) -> int:
        """To the last worker."""
        return self.num_workers - 1 - self.worker

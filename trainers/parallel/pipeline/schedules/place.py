"""The place of a worker in a pipeline: all that its program depends on, besides the number of micro-batches."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The place of one worker."""

    worker: int
    """Number of the worker, from 0."""
    num_workers: int
    """Number of workers in the pipeline."""
    stages: tuple[int, ...]
    """Stages that the worker holds, in the order data passes them."""

    @property
    def num_hops(self) -> int:
        """Number of workers after this one."""
        return self.num_workers - 1 - self.worker

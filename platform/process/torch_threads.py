"""The number of threads with which torch computes.

The number determines the order in which products are summed, and so, on some machines, the last bits of every result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def take_up() -> None:
    """Make the calling thread use the number of threads of `torch.set_num_threads`, from its first operation on.

    By itself a new thread adopts that number at the first operation that torch parallelises. Matrix products before
    that use OpenMP's own number.
    """
    torch.get_num_threads()


@contextlib.contextmanager
def using(num_threads: int) -> Iterator[None]:
    """Compute with `num_threads` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

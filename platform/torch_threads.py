"""By how many threads torch computes.

The number decides in which order products are added up, and so, on some machines, the last bits of every result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def take_up() -> None:
    """Have the calling thread compute by as many threads as `torch.set_num_threads` was told, from its first operation.

    By itself a new thread takes the number up with the first operation that torch divides; products of matrices before
    that are made by OpenMP's own number.
    """
    torch.get_num_threads()


@contextlib.contextmanager
def using(num_threads: int) -> Iterator[None]:
    """Compute by so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

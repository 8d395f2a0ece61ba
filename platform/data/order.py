"""The global order of samples: it depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """Consecutive blocks of an epoch's order whose rows are mixed with each other.

    `blocks` are indices of blocks (row groups); `permutation` orders the rows of their concatenation.
    """

    first: int
    """Position of its first sample in the epoch's order."""
    blocks: tuple[int, ...]
    permutation: NDArray[np.int64] | None
    """None: as they come."""
    num_rows: int


def windows(
    block_rows: Sequence[int], *, window_rows: int, seed: int, epoch: int, shuffle: bool = True
) -> Iterator[Window]:
    """The order of one epoch as windows, each of at least `window_rows` rows but the last.

    The blocks are shuffled, then the rows inside a window. With one window for all rows this is a permutation of them all.
    Memory is bounded by a window, and a window can be made without reading those before it.

    Args:
        block_rows: rows of each block of the data.
        window_rows: how many rows are mixed at a time, at least.
        seed: of the run.
        epoch: counted from 0.
        shuffle: False: the order of the data itself.
    """
    generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    order = generator.permutation(len(block_rows)) if shuffle else np.arange(len(block_rows))
    first, blocks, rows = 0, [], 0
    for position, block in enumerate(order.tolist()):
        blocks.append(block)
        rows += block_rows[block]
        if rows >= window_rows or position == len(block_rows) - 1:
            permutation = None
            if shuffle:
                # One generator a window: its order needs none of the windows before it to be drawn.
                inner = np.random.default_rng(np.random.SeedSequence([seed, epoch, first + 1]))
                permutation = inner.permutation(rows)
            yield Window(first, tuple(blocks), permutation, rows)
            first, blocks, rows = first + rows, [], 0


def share_bounds(num_samples: int, num_shares: int) -> list[tuple[int, int]]:
    """(start, stop) of each share of a batch: sizes differ by at most one, the first shares are the larger ones."""
    base, larger = divmod(num_samples, num_shares)
    bounds, start = [], 0
    for share in range(num_shares):
        stop = start + base + (share < larger)
        bounds.append((start, stop))
        start = stop
    return bounds

"""Even splits of a range of indices."""

from __future__ import annotations

from itertools import pairwise


def split_evenly(size: int, count: int) -> list[tuple[int, int]]:
    """Split `size` indices into `count` consecutive ranges; sizes differ by at most one, the larger ones first."""
    base, extra = divmod(size, count)
    bounds = [index * base + min(index, extra) for index in range(count + 1)]
    return list(pairwise(bounds))

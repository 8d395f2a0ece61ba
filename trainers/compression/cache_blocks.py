"""Iteration over long vectors in blocks that stay in a core's cache from one operation to the next."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 16


def blocks(length: int, device: torch.device, width: int = 1) -> Iterator[slice]:
    """Yield slices that cover `length` rows of `width` values each; a single slice on devices other than the CPU.

    Two operations on a vector longer than the cache fetch it from memory twice, and allocate intermediate results of
    its size. Block by block, it is fetched once.
    """
    rows = max(1, _BLOCK // width) if device.type == "cpu" else max(1, length)
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))

"""Long vectors in blocks that stay in a core's cache from one operation to the next."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 16


def blocks(length: int, device: torch.device, width: int = 1) -> Iterator[slice]:
    """Slices that make up `length` rows of `width` values each; one slice where there is no such cache.

    Two operations on a vector longer than the cache fetch it twice from memory, and the memory of what lies between
    them has to be got from the system each time; block by block, that is once.
    """
    rows = max(1, _BLOCK // width) if device.type == "cpu" else max(1, length)
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))

"""Batch sizes for which a compiled model or a CUDA graph is made: few, to limit their number."""

from __future__ import annotations

from collections.abc import Sequence


def padded_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of two below the largest batch, and the largest: padding at most doubles a batch."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if max_batch_size == 1 else (*sizes, max_batch_size)


def padded_size(num_samples: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds the samples; their own number if none does, or no sizes are given."""
    return next((size for size in sizes if size >= num_samples), num_samples)

"""Padding: of batches to a few sizes, for compiled models and CUDA graphs, and of samples to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHORTEST = 8
"""Length up to which samples share a bucket."""


@dataclass(frozen=True)
class Padding:
    """The inputs of a model whose samples have any length, which is that of their first dimension."""

    values: Mapping[str, float]
    """Maps their names to the values with which they are padded."""
    mask: str | None = None
    """The one that is 1 where a sample has values and 0 where it is padded; None: the model takes none."""
    most: int | None = None
    """Greatest length; None: any."""


def bucket(length: int, most: int | None = None) -> int:
    """Return the power of two, or the greatest length, up to which lengths are padded: at most half of a row is."""
    size = max(SHORTEST, 1 << (length - 1).bit_length())
    return size if most is None else min(size, most)


def padded_sizes(max_batch_size: int, multiple: int = 1, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the sizes to which batches are padded, ascending, up to one that holds the largest batch.

    By default they are a number and its doubles: padding at most doubles a batch, beyond the first size.

    Args:
        max_batch_size: largest batch.
        multiple: number that divides each size.
        given: sizes that are wanted instead of those; larger ones than the largest batch have no use, and are left out.
    """
    largest = -(-max_batch_size // multiple) * multiple
    if given is not None:
        return (*sorted({size for size in given if size < largest}), largest)
    sizes = [multiple]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if largest == multiple else (*sizes, largest)


def padded_size(num_samples: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds the samples; their own number if none does, or no sizes are given."""
    return next((size for size in sizes if size >= num_samples), num_samples)

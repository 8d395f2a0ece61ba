"""A fast selection of the largest values: a sample estimates the threshold, then few candidates are sorted.

After Lin et al. 2018 ("Deep gradient compression"), section 5 ("hierarchical top-k selection"), but exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import nonzero_indices

_SAMPLE = 1 << 14
_DIRECT = 1 << 16
"""Largest number of values for which torch's selection is as fast as sampling."""


def largest(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of the `count` values of largest magnitude, ascending; the first ones if values are equal.

    NaN counts as infinite.

    Args:
        values: [values].
        count: at most the number of values.
        generator: generator of the sample, which affects only the time, never the result.
    """
    if count in (0, values.numel()):
        return torch.arange(count, device=values.device)
    sizes = values.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    bounds = None if values.numel() <= _DIRECT else _bounds(sizes, count, generator)
    if bounds is None:
        return _exactly(sizes, count)
    candidates = nonzero_indices(sizes >= bounds[0])
    if candidates.numel() < count:  # the sample was misleading
        return _exactly(sizes, count)
    return candidates.index_select(0, _exactly(sizes.index_select(0, candidates), count, bounds[1]))


def sample_of(sizes: Tensor, num_drawn: int, generator: torch.Generator) -> Tensor:
    """Return `num_drawn` of the values, drawn with replacement."""
    drawn = torch.randint(sizes.numel(), (num_drawn,), generator=generator, device=sizes.device)
    return sizes[drawn]


def _bounds(sizes: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """Return two values that probably enclose the `count`-th largest; None if a sample would not help."""
    num_drawn = min(_SAMPLE, sizes.numel() // 4)
    expected = num_drawn * count / sizes.numel()
    margin = 4 * math.sqrt(expected) + 2  # four standard deviations
    ranks = math.ceil(expected + margin), math.floor(expected - margin)
    if ranks[0] > num_drawn:
        return None
    drawn = sample_of(sizes, num_drawn, generator).sort(descending=True).values
    return drawn[ranks[0] - 1], drawn[ranks[1] - 1] if ranks[1] > 0 else sizes.new_tensor(torch.inf)


def _exactly(sizes: Tensor, count: int, upper: Tensor | None = None) -> Tensor:
    """Return the indices of the `count` largest, ascending; the first ones if values are equal.

    Args:
        sizes: magnitudes of the values.
        count: at most their number.
        upper: upper bound of the smallest selected value, probably: larger values need not be sorted.
    """
    rest = sizes if upper is None else sizes.index_select(0, nonzero_indices(sizes <= upper))
    missing = count - (sizes.numel() - rest.numel())
    if missing < 1:
        rest, missing = sizes, count
    smallest = rest.kthvalue(rest.numel() - missing + 1).values
    chosen = sizes > smallest
    equal = nonzero_indices(sizes == smallest)
    chosen[equal[: count - int(chosen.sum())]] = True
    return nonzero_indices(chosen)

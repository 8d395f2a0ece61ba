"""The places of the largest values, quickly: a sample says where about the threshold lies, then the few are sorted.

After Lin et al. 2018 ("Deep gradient compression"), section 5 ("hierarchical top-k selection"), but exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import places_of

_SAMPLE = 1 << 14
_DIRECT = 1 << 16
"""Up to so many values, torch sorts as quickly as we sample."""


def largest(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Places of exactly `count` values, ascending: the largest in absolute value; of equal ones, the first.

    Not-a-number counts as infinite.

    Args:
        values: [values].
        count: at most their number.
        generator: draws the sample. It changes how long the search takes, never what is found.
    """
    if count in (0, values.numel()):
        return torch.arange(count, device=values.device)
    sizes = values.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    bounds = None if values.numel() <= _DIRECT else _bounds(sizes, count, generator)
    if bounds is None:
        return _exactly(sizes, count)
    candidates = places_of(sizes >= bounds[0])
    if candidates.numel() < count:  # the sample misled
        return _exactly(sizes, count)
    return candidates.index_select(0, _exactly(sizes.index_select(0, candidates), count, bounds[1]))


def sample_of(sizes: Tensor, num_drawn: int, generator: torch.Generator) -> Tensor:
    """`num_drawn` of the values, drawn with replacement."""
    drawn = torch.randint(sizes.numel(), (num_drawn,), generator=generator, device=sizes.device)
    return sizes[drawn]


def _bounds(sizes: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """Two values between which the `count`-th largest should lie; None if the sample would tell too little."""
    num_drawn = min(_SAMPLE, sizes.numel() // 4)
    expected = num_drawn * count / sizes.numel()
    margin = 4 * math.sqrt(expected) + 2  # four standard deviations
    ranks = math.ceil(expected + margin), math.floor(expected - margin)
    if ranks[0] > num_drawn:
        return None
    drawn = sample_of(sizes, num_drawn, generator).sort(descending=True).values
    return drawn[ranks[0] - 1], drawn[ranks[1] - 1] if ranks[1] > 0 else sizes.new_tensor(torch.inf)


def _exactly(sizes: Tensor, count: int, upper: Tensor | None = None) -> Tensor:
    """Places of the `count` largest, ascending; of equal ones, the first.

    Args:
        upper: probably at least as large as the smallest of them: those above need not be sorted.
    """
    rest = sizes if upper is None else sizes.index_select(0, places_of(sizes <= upper))
    missing = count - (sizes.numel() - rest.numel())
    if missing < 1:
        rest, missing = sizes, count
    smallest = rest.kthvalue(rest.numel() - missing + 1).values
    chosen = sizes > smallest
    equal = places_of(sizes == smallest)
    chosen[equal[: count - int(chosen.sum())]] = True
    return places_of(chosen)

"""The places of the largest values, quickly: a sample says where about the threshold lies, then the few are sorted.

After Lin et al. 2018 ("Deep gradient compression"), section 5 ("hierarchical top-k selection"), but exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SAMPLE = 1 << 14
_DIRECT = 1 << 16
"""Up to so many values, torch sorts as quickly as we sample."""


def largest(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Places of exactly `count` values, ascending: the largest in absolute value; of equal ones, the first.

    Not-a-number counts as larger than all.

    Args:
        values: [values].
        count: at most their number.
        generator: draws the sample. It changes how long the search takes, never what is found.
    """
    if count in (0, values.numel()):
        return torch.arange(count, device=values.device)
    sizes = values.abs()
    candidates = None if values.numel() <= _DIRECT else _candidates(sizes, count, generator)
    if candidates is None:
        return _exactly(sizes, count)
    return candidates[_exactly(sizes[candidates], count)]


def sample_of(sizes: Tensor, num_drawn: int, generator: torch.Generator) -> Tensor:
    """`num_drawn` of the values, drawn with replacement."""
    drawn = torch.randint(sizes.numel(), (num_drawn,), generator=generator, device=sizes.device)
    return sizes[drawn]


def _candidates(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor | None:
    """Places of at least `count` values, all at least as large as any other; None if the sample misled."""
    num_drawn = min(_SAMPLE, sizes.numel() // 4)
    expected = num_drawn * count / sizes.numel()
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 2)  # four standard deviations on the safe side
    if rank > num_drawn // 2:
        return None
    threshold = sample_of(sizes, num_drawn, generator).topk(rank).values[-1]
    candidates = (~(sizes < threshold)).nonzero().view(-1)  # so that not-a-number is one
    return candidates if candidates.numel() >= count else None


def _exactly(sizes: Tensor, count: int) -> Tensor:
    """Places of the `count` largest, ascending; of equal ones, the first."""
    smallest = sizes.kthvalue(sizes.numel() - count + 1).values
    if smallest.isnan():
        chosen, equal = torch.zeros_like(sizes, dtype=torch.bool), sizes.isnan()
    else:
        chosen, equal = ~(sizes <= smallest), sizes == smallest
    missing = count - int(chosen.sum())
    chosen[equal.nonzero().view(-1)[:missing]] = True
    return chosen.nonzero().view(-1)

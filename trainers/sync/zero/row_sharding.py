"""The division of a group's parameters into shards: whole rows, with the ranks' loads as even as rows allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Rows = tuple[int, int]
"""Rows (indices of dimension 0) as (start, stop)."""


def cut_rows(parameters: Sequence[Tensor], num_ranks: int) -> list[list[Rows]]:
    """Return each rank's rows of each parameter, `[parameter][rank]`: consecutive, in rank order, every row once.

    A parameter's rows are spread as evenly as possible. Rows left over go to the ranks that hold the fewest elements of
    the group so far, the longest rows first. So two ranks' loads differ by one row of the group at most. A
    parameter with fewer rows than ranks does not always land on the first of them.
    """
    loads = [0] * num_ranks
    cuts: dict[int, list[Rows]] = {}
    for index in sorted(range(len(parameters)), key=lambda index: -_row_numel(parameters[index])):
        row_numel, num_rows = _row_numel(parameters[index]), parameters[index].shape[0]
        each, left_over = divmod(num_rows, num_ranks)
        counts = [each] * num_ranks
        for rank in sorted(range(num_ranks), key=loads.__getitem__)[:left_over]:
            counts[rank] += 1
        start = 0
        cuts[index] = []
        for rank, count in enumerate(counts):
            cuts[index].append((start, start + count))
            loads[rank] += count * row_numel
            start += count
    return [cuts[index] for index in range(len(parameters))]


def can_be_cut(parameter: Tensor) -> bool:
    """Return True if the parameter has rows: a scalar and an empty tensor have none."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _row_numel(parameter: Tensor) -> int:
    return math.prod(parameter.shape[1:])

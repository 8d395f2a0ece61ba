"""Models that write to their parameters when they are used: `nn.Embedding(max_norm=...)`, a clamp in a forward.

Servers get gradients. What a worker's model writes to its copy of the parameters they never learn of, and the next
parameters that the worker fetches come without it. Parameters that lie in a server's memory are to be left alone in any
case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class WriteWatch:
    """Looks for writes to parameters between `begin` and `end`.

    The first time their bits are compared. From then on torch's counters of changes are, which tell in no time, and of
    every write but those past autograd (through `.data`, or another view of the memory).
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """
        Args:
            named: the parameters, in order; views of one flat tensor.
        """
        self._named = list(named)
        self._counts: list[int] = []
        self._before: Tensor | None = None
        self._has_compared = False
        self.written: set[str] = set()
        """The parameters that were written to."""

    def begin(self, values: Tensor) -> None:
        """The model is used from here on.

        Args:
            values: what the parameters are views of, `[elements]`.
        """
        self._counts = [parameter._version for _, parameter in self._named]
        self._before = None if self._has_compared else values.detach().clone()

    def end(self, values: Tensor) -> list[str]:
        """Returns the parameters that were written to, and never before."""
        counts = zip(self._named, self._counts, strict=True)
        found = {name for (name, parameter), count in counts if parameter._version != count}
        if self._before is not None:
            found |= self._differing(self._before, values)
            self._before, self._has_compared = None, True
        new = [name for name, _ in self._named if name in found - self.written]
        self.written |= found
        return new

    def _differing(self, before: Tensor, after: Tensor) -> set[str]:
        if _same_bits(before, after):
            return set()
        sizes = [parameter.numel() for _, parameter in self._named]
        parts = zip(self._named, before.split_with_sizes(sizes), after.split_with_sizes(sizes), strict=True)
        return {name for (name, _), one, other in parts if not _same_bits(one, other)}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))

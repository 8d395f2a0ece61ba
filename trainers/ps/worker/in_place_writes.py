"""Models that write to their parameters when they are used: `nn.Embedding(max_norm=...)`, a clamp in a forward.

Servers get gradients only. They never see what a worker's model writes to its copy of the parameters, and the next
parameters that the worker fetches lack it. Parameters in a server's memory must not be written to in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class InPlaceWrites:
    """A detector of writes to parameters between `begin` and `end`.

    The first time it compares their bits. From then on it compares torch's counters of changes, which cost nothing.
    They miss only writes that bypass autograd (through `.data`, or another view of the memory).
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """
        Args:
            named: names and parameters, in order; the parameters are views of one flat tensor.
        """
        self._named = list(named)
        self._counts: list[int] = []
        self._before: Tensor | None = None
        self._has_compared = False
        self.written: set[str] = set()
        """Parameters that were written to."""

    def begin(self, values: Tensor) -> None:
        """Begin before the model is used.

        Args:
            values: flat tensor that the parameters are views of, `[elements]`.
        """
        self._counts = [parameter._version for _, parameter in self._named]
        self._before = None if self._has_compared else values.detach().clone()

    def end(self, values: Tensor) -> list[str]:
        """Return the parameters that were written to since `begin`, and never before."""
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

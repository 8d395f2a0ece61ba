"""Numbered versions of a stage's weights, for micro-batches in flight while the weights change.

Weight stashing of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section
3.3. It costs the memory of each older version that is still in use. An update also copies the stage's weights if the
newest version is in use (on all stages but the last), because optimizers work in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

UpdateInPlace = Callable[[Sequence[Tensor]], None]


class WeightVersions:
    """The newest version of some parameters, and older ones for as long as they are held.

    The parameters stay the same objects; `place` gives them the memory of a version. The backward pass needs the
    version of its forward pass, because autograd keeps some weights themselves and others as views.

    Args:
        parameters: the parameters; their current values are version 0.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._own = [parameter.data for parameter in self._parameters]
        self._by_number: dict[int, list[Tensor]] = {0: self._own}
        self._spare: list[list[Tensor]] = []
        self._holders: Counter[int] = Counter()
        self._wanted_from = 0
        self._placed = 0
        self._peak = 1
        self.newest = 0
        """Number of updates so far."""

    @property
    def num_held(self) -> int:
        """Number of versions in memory."""
        return len(self._by_number)

    @property
    def peak_held(self) -> int:
        """Most versions in memory at once."""
        return self._peak

    def hold(self, number: int) -> None:
        """Keep a version until `release` has been called as often as `hold`."""
        self._holders[number] += 1

    def release(self, number: int) -> None:
        self._holders[number] -= 1

    def want_from(self, number: int) -> None:
        """Keep this version and every later one, even if nobody holds them."""
        self._wanted_from = number

    def place(self, number: int) -> None:
        """Point the parameters at a version that is held, or at the newest."""
        if number != self._placed:
            for parameter, tensor in zip(self._parameters, self._by_number[number], strict=True):
                parameter.data = tensor
            self._placed = number

    @torch.no_grad()
    def advance(self, update: UpdateInPlace) -> None:
        """Make the next version: `update` changes, in place, tensors that have the newest one's values."""
        self._drop_unneeded()
        before = self._by_number[self.newest]
        if self._is_needed(self.newest):
            after = self._spare.pop() if self._spare else [torch.empty_like(tensor) for tensor in before]
            if after:
                torch._foreach_copy_(after, before)
        else:
            after = self._by_number.pop(self.newest)
        update(after)
        if self._placed == self.newest and before is after:
            self._placed += 1
        self.newest += 1
        self._by_number[self.newest] = after
        self._peak = max(self._peak, len(self._by_number))

    @torch.no_grad()
    def settle(self) -> None:
        """Give the parameters the newest version in their original memory; call
        this when no micro-batch is in flight.
        """
        self._holders.clear()
        newest = self._by_number[self.newest]
        if newest is not self._own and newest:
            torch._foreach_copy_(self._own, newest)
        others = [*self._by_number.values(), *self._spare]
        self._spare = [tensors for tensors in others if tensors is not self._own]
        self._by_number = {self.newest: self._own}
        for parameter, tensor in zip(self._parameters, self._own, strict=True):
            parameter.data = tensor
        self._placed = self._wanted_from = self.newest

    def _is_needed(self, number: int) -> bool:
        return self._holders[number] > 0 or number >= self._wanted_from

    def _drop_unneeded(self) -> None:
        for number in [n for n in self._by_number if n != self.newest and not self._is_needed(n)]:
            self._spare.append(self._by_number.pop(number))
            del self._holders[number]

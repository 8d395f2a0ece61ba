"""A filter for changes of parameters that matter enough to cross a slow link: the rest is kept back and summed.

Hsieh et al., "Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds" (2017), section 3.2 (Approximate
Synchronous Parallel, the significance filter): an update crosses once the accumulated change is at least a fraction s
of the parameter's value. A value near zero would let every change cross, so its magnitude counts as `FLOOR` at least.
Their proof of convergence has the fraction fall with the root of the number of updates, as `falls` does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOOR = 1e-3
"""Least magnitude that a parameter's value counts as."""
_PLACE_BYTES = 4


def threshold(values: Tensor, significance: float, floor: float = FLOOR) -> Tensor:
    """Return the smallest significant change of each element, in the shape of `values`.

    Args:
        values: parameters, `[elements]`.
        significance: s, the fraction of a value.
        floor: least magnitude that a value counts as.
    """
    return values.abs().clamp_(min=floor).mul_(significance)


class Residual:
    """The change of a flat tensor that has not been sent yet.

    Attributes:
        pending: `[elements]`: exactly what was added less what was taken. An element is taken as a whole or not at all.
    """

    def __init__(self, like: Tensor, significance: float, floor: float = FLOOR, *, falls: bool = False) -> None:
        """
        Args:
            like: tensor of the shape, dtype and device of the changes.
            significance: s; 0: every change is significant.
            floor: least magnitude that a value counts as.
            falls: True to divide s by the root of the number of updates so far.
        """
        if significance < 0 or floor <= 0:
            raise ValueError(f"significance must not be negative and floor positive, got {significance} and {floor}")
        self.pending = torch.zeros_like(like)
        self.significance = significance
        self._floor = floor
        self._falls = falls
        self._num_taken = self._num_seen = 0

    def run_report(self) -> dict[str, float]:
        """Return the `part` of the elements that were taken as significant; empty before the first time."""
        return {"part": round(self._num_taken / self._num_seen, 6)} if self._num_seen else {}

    def add(self, change: Tensor) -> None:
        """Add a change, `[elements]`."""
        self.pending += change

    def take(self, values: Tensor, *, everything: bool = False, num_updates: int = 1) -> tuple[Tensor, Tensor]:
        """Remove the significant changes and return them; what stays is below the threshold of its value, everywhere.

        Args:
            values: values with the changes, `[elements]`.
            everything: True to remove insignificant changes too.
            num_updates: number of updates that led to the values.

        Returns:
            Their places, int64, ascending, and the change at each.
        """
        chosen = self.pending != 0
        if not everything and self.significance:
            fraction = self.significance / (math.sqrt(max(1, num_updates)) if self._falls else 1)
            chosen &= self.pending.abs() >= threshold(values, fraction, self._floor)
        places = chosen.nonzero().flatten()
        if not everything:
            self._num_taken, self._num_seen = self._num_taken + places.numel(), self._num_seen + chosen.numel()
        change = self.pending[places]
        self.pending[places] = 0
        return places, change

    @property
    def owes(self) -> bool:
        """True if anything is kept back."""
        return bool(self.pending.any())


def pack(places: Tensor, change: Tensor, num_elements: int) -> list[Tensor]:
    """Encode a change as the smaller of two messages: places (int32 where they fit) and values, or all values.

    Args:
        places: indices of the changed elements, int64, ascending.
        change: change at each place.
        num_elements: number of elements of the whole tensor.
    """
    if places.numel() * (_PLACE_BYTES + change.element_size()) >= num_elements * change.element_size():
        return [change.new_zeros(num_elements).index_copy_(0, places, change)]
    return [places.to(torch.int32) if num_elements < 2**31 else places, change]


def unpack(tensors: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """Return places (int64; None: all of them) and values from the result of `pack`."""
    if len(tensors) == 1:
        return None, tensors[0]
    return tensors[0].to(torch.int64), tensors[1]

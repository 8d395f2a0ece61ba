"""Tensors concatenated in flat ones, the form in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all tensors, in the widest of their types."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of a flat tensor as views with the shapes of `like`."""
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class FlatTensors:
    """Some tensors as one flat tensor for each of their dtypes and devices.

    Args:
        tensors: any tensors; their memory must stay the same.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        self._groups = list(kinds.values())

    @torch.no_grad()
    def pack(self) -> list[Tensor]:
        """Return copies of the current values."""
        return self.pack_these(self._tensors)

    def pack_these(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pack other tensors of the same shapes and types in the same layout."""
        return [flatten([tensors[index] for index in group]) for group in self._groups]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the tensors by the values of `flats`, in the layout of `pack`."""
        torch._foreach_copy_(self._tensors, self.views(flats))

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the view of each tensor in `flats`, in the order and with the shapes of the tensors."""
        found: dict[int, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            found |= zip(group, unflatten(flat, [self._tensors[index] for index in group]), strict=True)
        return [found[index] for index in range(len(self._tensors))]

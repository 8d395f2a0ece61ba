"""Tensors side by side in flat ones, as they go over the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FlatTensors:
    """Some tensors as one flat tensor for each of their dtypes and devices.

    Args:
        tensors: any; their memory must stay the same.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        self._groups = list(kinds.values())

    @torch.no_grad()
    def pack(self) -> list[Tensor]:
        """The values as they are now, copied."""
        return self.pack_these(self._tensors)

    def pack_these(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Other tensors of the same shapes and types, laid out alike."""
        return [torch.cat([tensors[index].reshape(-1) for index in group]) for group in self._groups]

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the tensors by the values of `flats`, laid out as `pack` gives them."""
        torch._foreach_copy_(self._tensors, self.views(flats))

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Where each tensor lies in `flats`, in the order and with the shapes of the tensors."""
        found: dict[int, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            parts = torch.split(flat, [self._tensors[index].numel() for index in group])
            found |= {index: part.view(self._tensors[index].shape) for index, part in zip(group, parts, strict=True)}
        return [found[index] for index in range(len(self._tensors))]

"""Snapshots of modules' buffers for passes that run more than once: the extra pass must not change the buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class _Before(NamedTuple):
    """A buffer and its value before a pass."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor


class BuffersBefore:
    """The values that modules' buffers had before a pass. Buffers that the pass does not change are not kept."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        self._kept = [
            _Before(owner, name, tensor, tensor._version, tensor.detach().clone())
            for owner in owners
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    def keep_changed(self) -> None:
        """Drop the values of buffers that the pass did not change. To be called after the pass."""
        self._kept = [before for before in self._kept if _may_have_changed(before)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the buffers from before the pass inside the context, and their current values afterwards."""
        values: dict[tuple[nn.Module, str], Tensor] = {
            (before.owner, before.name): before.value.clone() for before in self._kept
        }
        with buffers_in_place(values):
            yield


@contextlib.contextmanager
def buffers_in_place(values: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Install these tensors as the modules' buffers inside the context; afterwards restore the modules' own."""
    own = {(owner, name): owner._buffers[name] for owner, name in values}
    try:
        for (owner, name), tensor in values.items():
            owner._buffers[name] = tensor
        yield
    finally:
        for (owner, name), before in own.items():
            owner._buffers[name] = before


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Replace the model's buffers by copies inside the context, so that the buffers themselves do not change."""
    copies = {
        (owner, name): tensor.detach().clone()
        for owner in model.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None
    }
    with buffers_in_place(copies):
        yield


def _may_have_changed(before: _Before) -> bool:
    if before.owner._buffers.get(before.name) is not before.tensor or before.tensor._version != before.version:
        return True
    # torch's batch normalisation updates its statistics without increasing the tensor's version.
    return isinstance(before.owner, _NormBase) and before.owner.training

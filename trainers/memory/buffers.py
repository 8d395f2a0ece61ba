"""Buffers of modules that are run once more than they should be: what the extra pass does to them does not count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class _Before(NamedTuple):
    """A buffer before a pass."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor


class BuffersBefore:
    """The values of modules' buffers before a pass; those that it leaves alone are not kept."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        self._kept = [
            _Before(owner, name, tensor, tensor._version, tensor.detach().clone())
            for owner in owners
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    def keep_what_changed(self) -> None:
        """The pass is over."""
        self._kept = [before for before in self._kept if _may_have_changed(before)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the buffers are as before the pass; afterwards they are what they were when this was entered."""
        values: dict[tuple[nn.Module, str], Tensor] = {
            (before.owner, before.name): before.value.clone() for before in self._kept
        }
        with buffers_in_place(values):
            yield


@contextlib.contextmanager
def buffers_in_place(values: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Inside, modules have these tensors as their buffers, and may change them; afterwards their own, untouched."""
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
    """Inside, whatever happens to the model's buffers happens to copies."""
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
    # torch's batch normalisation moves its statistics without counting a version.
    return isinstance(before.owner, _NormBase) and before.owner.training

"""The memory that a computation holds, from torch's operations: what lives at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of tensors that are made in it, until they are released.

    Buffers within a kernel are not seen.

    Attributes:
        held_bytes: bytes that live now.
        peak_bytes: most bytes that lived at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = {_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and (key := _key(each)) not in given and key not in self._known:
                storage = each.untyped_storage()
                self._known.add(key)
                self.held_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                weakref.finalize(storage, self._release, key, storage.nbytes())
        return out

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= num_bytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that live at a time in a computation, with its result."""
    with MemoryMeter() as meter:
        held = compute()
    del held
    return int(meter.peak_bytes)

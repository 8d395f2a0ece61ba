"""Modules whose parameters a model uses while it does not call them: an embedding whose weights are the output layer.

Where parameters are gathered module by module, they are there only while their module is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from orchestray.platform.data.nested import tensors_in

_MARK = "is_used_from_outside"


@contextlib.contextmanager
def noting_uses(model: nn.Module) -> Iterator[None]:
    """Mark the modules whose parameters are used inside the context while they are not called."""
    called: list[nn.Module] = []
    handles = []
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # its operations are not seen, and it takes no hooks
            handles.append(module.register_forward_pre_hook(lambda module, _: called.append(module), prepend=True))
            handles.append(module.register_forward_hook(lambda *_: _drop_last(called), always_call=True))
    try:
        with _Noting(model, called):
            yield
    finally:
        for handle in handles:
            handle.remove()


def is_used_from_outside(module: nn.Module) -> bool:
    """Return True if a module is marked."""
    return bool(vars(module).get(_MARK, False))


def _drop_last(called: list[nn.Module]) -> None:
    called.pop()


class _Noting(TorchFunctionMode):
    """A mode that marks a module when a parameter in it is used, and the module is not being called."""

    def __init__(self, model: nn.Module, called: list[nn.Module]) -> None:
        super().__init__()
        self._called = called
        self._holders: dict[int, list[nn.Module]] = {}
        """Modules that a parameter is in, by its id."""
        for module in model.modules():
            for parameter in module.parameters():
                self._holders.setdefault(id(parameter), []).append(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [holders for tensor in tensors_in((args, kwargs)) if (holders := self._holders.get(id(tensor)))]
        if used and tensors_in(result):  # shapes and dtypes are there at any time
            called = {id(module) for module in self._called}
            for holder in (holder for holders in used for holder in holders if id(holder) not in called):
                vars(holder)[_MARK] = True
        return result

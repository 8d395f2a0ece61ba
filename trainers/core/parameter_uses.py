"""Modules whose parameters a model uses while it does not call them: an embedding whose weights are the output layer.

Where parameters are gathered module by module, they are there only while their module is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from orchestray.platform.data.nested import tensors_in

_MARK = "is_used_from_outside"


@contextlib.contextmanager
def noting_uses(model: nn.Module, without: Sequence[Tensor] = ()) -> Iterator[Uses]:
    """Mark the modules whose parameters are used inside the context while they are not called.

    Args:
        model: the model.
        without: tensors whose uses do not count, though they may be parameters.
    """
    called: list[nn.Module] = []
    handles = []
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # its operations are not seen, and it takes no hooks
            handles.append(module.register_forward_pre_hook(lambda module, _: called.append(module), prepend=True))
            handles.append(module.register_forward_hook(lambda *_: _drop_last(called), always_call=True))
    try:
        with Uses(model, called, {id(tensor) for tensor in without}) as uses:
            yield uses
    finally:
        for handle in handles:
            handle.remove()


def is_used_from_outside(module: nn.Module) -> bool:
    """Return True if a module is marked."""
    return bool(vars(module).get(_MARK, False))


def are_returned(model: nn.Module, outputs: Any) -> bool:
    """Return True if outputs of a model share the memory of its parameters, scalars apart."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if parameter.dim()}
    return any(tensor.numel() and tensor.untyped_storage().data_ptr() in held for tensor in tensors_in(outputs))


def _drop_last(called: list[nn.Module]) -> None:
    called.pop()


class Uses(TorchFunctionMode):
    """A mode that marks a module when a parameter in it is used, and the module is not being called.

    Attributes:
        kinds: Kinds of the parameters of the model that have been used: `scalars` and other `parameters`.
    """

    def __init__(self, model: nn.Module, called: list[nn.Module], without: Collection[int]) -> None:
        super().__init__()
        self.kinds: set[str] = set()
        self._called = called
        self._holders: dict[int, list[nn.Module]] = {}
        """Modules that a parameter is in, by its id."""
        for module in model.modules():
            for parameter in (each for each in module.parameters() if id(each) not in without):
                self._holders.setdefault(id(parameter), []).append(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._holders]
        if used and tensors_in(result):  # shapes and dtypes are there at any time
            self.kinds |= {"parameters" if tensor.dim() else "scalars" for tensor in used}
            called = {id(module) for module in self._called}
            holders = [holder for tensor in used for holder in self._holders[id(tensor)]]
            for holder in (holder for holder in holders if id(holder) not in called):
                vars(holder)[_MARK] = True
        return result

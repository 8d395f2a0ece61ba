"""Copies of modules' buffers: for passes that run more than once, and for steps that fail."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_LARGE_BYTES = 4096
_MOST_COPIED_BYTES = 256 * 2**20


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
def untouched(model: nn.Module, task: object = None) -> Iterator[None]:
    """Replace buffers and parameters without gradients by copies inside; restore extra state and numbers afterwards.

    Numbers are those that modules, and the task, have as attributes, and count. What else a pass writes to stays; so do
    parameters without gradients beyond 256 MB in all, the largest of them.
    """
    extra = [(module, copy.deepcopy(module.get_extra_state())) for module in with_extra_state(model.modules())]
    held = [(owner, dict(owner._buffers.items())) for owner in model.modules()]
    numbers = [(counting, _numbers(counting)) for counting in (*model.modules(), *_tasks(task))]
    frozen = _frozen(model)
    copies = {
        (owner, name): tensor.detach().clone()
        for owner, buffers in held
        for name, tensor in buffers.items()
        if tensor is not None
    }
    own = {id(parameter): parameter.detach().clone() for _, _, parameter in frozen}
    try:
        for owner, name, parameter in frozen:
            owner._parameters[name] = nn.Parameter(own[id(parameter)], requires_grad=False)
        with buffers_in_place(copies):
            yield
    finally:
        for owner, name, parameter in frozen:
            owner._parameters[name] = parameter
        for owner, buffers in held:
            _set(owner, buffers)
        for counting, kept in numbers:
            for name in _numbers(counting).keys() - kept.keys():
                if hasattr(type(counting), name):  # where it begins
                    del vars(counting)[name]
            vars(counting).update(kept)
        for module, state in extra:
            module.set_extra_state(state)


def _tasks(task: object) -> Iterator[object]:
    """Yield a task, and those that it wraps."""
    while hasattr(task, "__dict__"):
        yield task
        task = vars(task).get("task")


def _numbers(owner: object) -> dict[str, float]:
    return {name: value for name, value in vars(owner).items() if type(value) in (int, float)}


def _frozen(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return owners and names of the parameters that have no gradients, the smallest first, up to 256 MB."""
    found = [
        (owner, name, parameter)
        for owner in model.modules()
        if not isinstance(owner, torch.jit.ScriptModule)
        for name, parameter in owner._parameters.items()
        # A pass changes no shard of a parameter (DTensor).
        if parameter is not None and not (parameter.requires_grad or hasattr(parameter, "to_local"))
    ]
    found.sort(key=lambda each: each[2].nbytes)
    ends = accumulate(parameter.nbytes for _, _, parameter in found)
    return [each for each, end in zip(found, ends, strict=True) if end <= _MOST_COPIED_BYTES]


def with_extra_state(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that have extra state."""
    return [module for module in modules if type(module).get_extra_state is not nn.Module.get_extra_state]


class ModuleTree:
    """The modules of a model, found again after one got other children: walking takes several times as long."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] | None = None

    def modules(self) -> list[nn.Module]:
        """Return the present modules; the same list as long as they are the same."""
        children = _children(self._modules)
        if children != self._children:
            self._modules = list(self._model.modules())
            self._children = _children(self._modules)
        return self._modules


class BufferCopies:
    """Copies of all buffers of a model, looked up afresh each time.

    A forward pass may change a buffer in place, resize it, assign another tensor to it, or register one.

    Attributes:
        parameters: owners and names of parameters that are treated like buffers.
        tree: modules of the model.
        modules: all modules of the model when its buffers were copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[tuple[nn.Module, str]] = []
        self.tree = ModuleTree(model)
        self.modules: list[nn.Module] = []
        self._held: dict[nn.Module, dict[str, Any]] = {}
        """The buffers of each module that had any, as it held them."""
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        self.modules = self.tree.modules()
        self._held = {module: dict(module._buffers.items()) for module in self.modules if module._buffers}
        tensors = [tensor for held in self._held.values() for tensor in held.values() if _is_copied(tensor)]
        copied = [*tensors, *(parameter for _, _, parameter in self._watched())]
        if len(copied) == len(self._copies) and all(map(_is_alike, copied, self._copies)):
            if copied:
                torch._foreach_copy_(self._copies, copied)
        else:
            self._copies = [tensor.clone() for tensor in copied]
        self._tensors = tensors

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the model the buffers that it had: the same objects, with their values."""
        for module in self.modules:
            _set(module, self._held.get(module, {}))
        for tensor, kept in zip(self._tensors, self._copies, strict=False):
            if tensor.shape != kept.shape:
                tensor.resize_(kept.shape)
            if not is_same(tensor, kept):
                tensor.copy_(kept)
        for (_, _, parameter), kept in zip(self._watched(), self._copies[len(self._tensors) :], strict=True):
            parameter.copy_(kept)

    def changed(self, without: Callable[[nn.Module], Collection[str]]) -> list[tuple[int, nn.Module, str]]:
        """Return number of the module, module and name of each buffer that is not what it was.

        Args:
            without: returns the names of a module's buffers that are not looked at.
        """
        before: dict[tuple[nn.Module, str], Tensor] = {}
        found = []
        for number, module in enumerate(self.modules):
            left_out = without(module) if module._buffers else ()
            for name, tensor in module._buffers.items():
                if name in left_out or not _is_copied(tensor):
                    continue
                before = before or self.values_before()
                kept = before.get((module, name))
                if kept is None or not is_same(tensor, kept):
                    found.append((number, module, name))
        copies = self._copies[len(self._tensors) :]
        for number, ((module, name, parameter), kept) in enumerate(zip(self._watched(), copies, strict=True)):
            if not is_same(parameter, kept):
                found.append((len(self.modules) + number, module, name))
        return found

    @torch.no_grad()
    def move_back(self) -> tuple[nn.Module, str] | None:
        """Move the values of buffers that are other tensors now into the memory that they had.

        Returns:
            Module and name of a buffer that has another dtype or shape now, or did not exist; None: there is none.
        """
        before = self.values_before()
        for module in self.modules:
            for name, tensor in module._buffers.items():
                if not _is_copied(tensor):
                    continue
                kept = before.get((module, name))
                if kept is None or not _is_alike(tensor, kept):
                    return module, name
                held = self._held[module][name]
                if tensor is not held:
                    held.copy_(tensor)
                    module._buffers[name] = held
        return None

    def values_before(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Return the copies by module and name of the buffer."""
        copies = iter(self._copies)
        return {
            (module, name): next(copies)
            for module, held in self._held.items()
            for name, tensor in held.items()
            if _is_copied(tensor)
        }

    def _watched(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for owner, name in self.parameters:
            parameter = owner._parameters[name]
            assert parameter is not None
            yield owner, name, parameter.detach()


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and values."""
    if not _is_alike(tensor, other):
        return False
    if tensor.nbytes >= _LARGE_BYTES and tensor.is_contiguous() and other.is_contiguous() and not tensor.nbytes % 8:
        with contextlib.suppress(RuntimeError):  # of memory that begins at an odd place
            tensor, other = tensor.view(-1).view(torch.int64), other.view(-1).view(torch.int64)  # a mask by eight bytes
    return torch.equal(tensor, other)


def _children(modules: Iterable[nn.Module]) -> list[nn.Module | None]:
    return [child for module in modules for child in module._modules.values()]


def _is_copied(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.layout == torch.strided  # a sparse one is only put back as an object


def _set(owner: nn.Module, held: Mapping[str, Any]) -> None:
    """Give a module these buffers and no others."""
    for name in [name for name in owner._buffers.keys() if name not in held]:  # noqa: SIM118 - no dict if scripted
        delattr(owner, name)
    for name, tensor in held.items():
        if owner._buffers[name] is not tensor:
            owner._buffers[name] = tensor


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device


def _may_have_changed(before: _Before) -> bool:
    if before.owner._buffers.get(before.name) is not before.tensor or before.tensor._version != before.version:
        return True
    # torch's batch normalisation updates its statistics without increasing the tensor's version.
    return isinstance(before.owner, _NormBase) and before.owner.training

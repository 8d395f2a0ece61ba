"""Modules that save and load in a way of their own: by methods and hooks of `nn.Module`, or with extra state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError

_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers as the modules hold them, by name, in the order of `state_dict`."""
    own: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        lasting = [(n, t) for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set]
        for name, tensor in [*module._parameters.items(), *lasting]:
            if tensor is not None:
                own[f"{path}.{name}" if path else name] = tensor
    return own


def saved_otherwise(model: nn.Module) -> list[str]:
    """Return the names of what `state_dict()` has beside what the modules hold, lacks, or gives in another form."""
    own, saved = own_tensors(model), model.state_dict()
    return [name for name in saved if name not in own] + [
        name for name, tensor in own.items() if not is_same_memory(saved.get(name), tensor)
    ]


def loads_itself(model: nn.Module) -> bool:
    """Return True if a module does more, when its state is loaded, than copy it; torch's own modules do not count."""
    return any(not _is_of_torch(function) for module in model.modules() for function in _loaders(module))


def _loaders(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in _LOADING:
        yield getattr(module, name)
    for name in _HOOKS:
        yield from getattr(module, name).values()


def _is_of_torch(function: Any) -> bool:
    for wrapper in ("hook", "func"):  # torch's own wrapper of hooks, and functools.partial
        function = getattr(function, wrapper, function)
    return str(getattr(function, "__module__", "")).split(".")[0] == "torch"


def load_through_modules(model: nn.Module, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Load a state by the model's own `load_state_dict`. Its parameters stay the same objects.

    Args:
        model: model to load into.
        tensors: tensors of its `state_dict`; tied ones under the first of their names.
        extra: its entries of other types.

    Raises:
        CheckpointError: the model does not take the state; it may be changed in part.
    """
    fresh: Mapping[str, Any] = model.state_dict()
    state: OrderedDict[str, Any] = OrderedDict((name, tensor.clone()) for name, tensor in tensors.items())
    by_memory = {_memory(fresh[name]): name for name in tensors if isinstance(fresh.get(name), Tensor)}
    for name, value in fresh.items():
        if isinstance(value, Tensor) and name not in tensors and (first := by_memory.get(_memory(value))) is not None:
            state[name] = state[first]
    state.update(extra)
    state._metadata = getattr(fresh, "_metadata", None)  # type: ignore[attr-defined] # the versions of modules
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"The saved weights do not fit the model: {type(error).__name__}: {' '.join(str(error).split())} Build the "
            "model from the arguments the weights were saved with."
        ) from error
    _keep_parameters(model, before)


@torch.no_grad()
def _keep_parameters(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Move what a module has assigned to a parameter into the one that the optimizer knows."""
    for name, parameter in before.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        loaded = dict(owner._parameters.items()).get(leaf)
        if loaded is parameter:
            continue
        if loaded is None or loaded.shape != parameter.shape:
            raise CheckpointError(f"Loading the saved weights gives the parameter {name!r} another shape.")
        parameter.copy_(loaded)
        owner._parameters[leaf] = parameter


def is_same_memory(tensor: Any, other: Tensor) -> bool:
    """Return True if both are tensors of the same place, shape and dtype."""
    return isinstance(tensor, Tensor) and _memory(tensor) == _memory(other)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

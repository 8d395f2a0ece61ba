"""The state of a model: what its `state_dict` has, and what a run needs besides to go on with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.buffer_kinds import Kind, apply_kinds, differences, kinds_of, set_values, transient
from orchestray.trainers.core.extra_state import decode, encode, of_extra
from orchestray.trainers.core.own_saving import (
    is_same_memory,
    load_through_modules,
    loads_itself,
    own_tensors,
    saved_otherwise,
)
from orchestray.trainers.core.weights import load_model_tensors, model_tensors, plain_tensors

BUFFER = "buffer/"
"""Prefix among `beside` of buffers that `state_dict` leaves out."""
HELD = "held/"
"""Prefix among `beside` of parameters and buffers that `state_dict` gives in another form or not at all."""
_LOST = 0.05
"""Largest part of a tensor's largest number by which it may change where it is saved, loaded and saved again."""
_OF_NO_USE = "The model saves a state that it does not load again, so a checkpoint of it would be of no use."


@dataclass(frozen=True)
class ModelState:
    """The state of a model."""

    tensors: Mapping[str, Tensor]
    """Tensors of `state_dict`, tied ones once: the model that others load."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors that a run needs, by prefixed names, kept in checkpoints. Only extra state of modules (see
    `encode`) is a part of the trained model.
    """
    buffers: Mapping[str, Kind | None] = field(default_factory=dict)
    """Buffers whose dtype or shape is not that of the model as it was built; None: it is gone. JSON values."""

    @property
    def extra(self) -> dict[str, Tensor]:
        """The encoded extra state of modules; empty if there is none."""
        return of_extra(self.beside)


def buffers_beside(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` leaves out, by their names among `ModelState.beside`."""
    return {BUFFER + name: tensor.detach().clone() for name, tensor in transient(model).items()}


class StateKeeper:
    """A model with the knowledge of how it was built, to take its state and to restore it."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: the model, as it was built.
        """
        self._model = model
        self._built = kinds_of(model)
        self.is_plain = not saved_otherwise(model) and not loads_itself(model)
        """True if the state is what the modules hold, and is copied into them."""
        self._verified: list[Any] | None = None

    def state(self) -> ModelState:
        """Return the state, with the memory of the parameters and copies of the buffers.

        Raises:
            CheckpointError: it cannot be kept.
        """
        model = self._model
        beside, changing = buffers_beside(model), kinds_of(model)
        changed = differences(changing, self._built)
        if self.is_plain:
            # Copies, as memory that NumPy has seen cannot be resized, which a module may do.
            tensors = model_tensors(model)
            copied = {name: tensor.clone() if name in changing else tensor for name, tensor in tensors.items()}
            return ModelState(copied, beside, changed)
        saved: Mapping[str, Any] = model.state_dict()
        extra = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
        for name, tensor in own_tensors(model).items():
            if not is_same_memory(saved.get(name), tensor):
                beside[HELD + name] = tensor.detach().clone() if name in changing else tensor.detach()
        beside |= encode(extra)
        tensors = plain_tensors({name: value for name, value in saved.items() if name not in extra})
        copied = {name: tensor.clone() if name in changing else tensor for name, tensor in tensors.items()}
        return ModelState(copied, beside, changed)

    def restore(self, state: ModelState) -> None:
        """Give the model a state.

        Raises:
            CheckpointError: it does not fit.
        """
        apply_kinds(self._model, {**dict.fromkeys(kinds_of(self._model)), **self._built, **state.buffers})
        load_state(self._model, state)

    def verify(self, build: Callable[[], nn.Module], state: ModelState) -> None:
        """Try to restore a state of a model that saves or loads itself, once for each set of names and shapes.

        Args:
            build: builds the model again, with other values.
            state: the state of this model.

        Raises:
            CheckpointError: a checkpoint of it would be of no use.
        """
        kinds = [[name, tensor.dtype, tensor.shape] for name, tensor in state.tensors.items()]
        if self.is_plain or kinds == self._verified:
            return
        fresh = build()
        keeper = StateKeeper(fresh)
        try:
            keeper.restore(replace(state, beside=state.extra))
            again = keeper.state().tensors
            wrong = [name for name, tensor in state.tensors.items() if not _are_alike(again.get(name), tensor)]
            keeper.restore(state)
        except Exception as error:
            raise CheckpointError(f"{_OF_NO_USE} {error}") from error
        restored, own = own_tensors(fresh), own_tensors(self._model)
        wrong += [name for name, tensor in own.items() if not _are_same(restored.get(name), tensor)]
        if wrong:
            raise CheckpointError(
                f"{_OF_NO_USE} A new model that loads it has other values in {', '.join(dict.fromkeys(wrong[:5]))}: "
                "its modules have to load (_load_from_state_dict, load_state_dict) what they save."
            )
        self._verified = kinds


def load_state(model: nn.Module, state: ModelState) -> None:
    """Copy a state into a model whose buffers have their dtypes and shapes.

    Raises:
        CheckpointError: it does not fit.
    """
    if extra := decode(state.extra):
        load_through_modules(model, state.tensors, extra)
    else:
        load_model_tensors(model, state.tensors)
    own = own_tensors(model)
    with torch.no_grad():
        for key, tensor in _under(HELD, state.beside).items():
            if key not in own or own[key].shape != tensor.shape:
                raise CheckpointError(f"The saved state of the model has {key!r}, which does not fit this model.")
            own[key].copy_(tensor)
    set_values(model, _under(BUFFER, state.beside), is_saved=False)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _are_same(tensor: Tensor | None, other: Tensor) -> bool:
    if tensor is None or (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    other = other.to(tensor.device)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _are_alike(tensor: Tensor | None, other: Tensor) -> bool:
    """Return True if a tensor is another one up to what is lost where it is saved in another form."""
    if tensor is None or tensor.shape != other.shape:
        return False
    if not other.is_floating_point() or not other.numel():
        return torch.equal(tensor, other.to(tensor.device))
    one, two = tensor.double().nan_to_num(), other.to(tensor.device).double().nan_to_num()
    return bool((one - two).abs().max() <= _LOST * two.abs().max())

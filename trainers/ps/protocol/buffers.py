"""A model's buffers (running statistics of batch normalisation) under a parameter server.

They are combined like those of lock-step replicas in `batch_norm.sync_statistics`: floating-point buffers become the
average weighted by samples, others the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.errors import TrainingError

_FIXED = (
    "A buffer of the model has another size now, or did not exist before the step, and parameter servers keep buffers "
    "of fixed sizes. Give it its full size in build_model, or use strategy.exchange.type: allreduce."
)


@dataclass(frozen=True)
class BufferPush:
    """The change that shares made to the buffers."""

    floats: Tensor
    """Moves of the floating-point buffers times the fraction of the batch; flat, float64. Behind them is what the
    optimizer has measured (`Optimizer.measurements`), which is added up in the same way.
    """
    integers: Tensor
    """Present values of the other buffers; flat, int64."""

    def __add__(self, other: BufferPush) -> BufferPush:
        """Return the combined change."""
        return BufferPush(self.floats + other.floats, torch.maximum(self.integers, other.integers))


NO_CHANGE = BufferPush(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
"""The change of a model without buffers."""


class BufferPlaces:
    """The places where a model keeps its buffers, which become views of one tensor of each kind.

    Walking through the modules, and copying one buffer after the other, would take longer than a small layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """Change how the buffers are stored; they stay the same objects.

        The model must get no further buffers. A buffer may be replaced by a tensor of the same dtype and shape.
        """
        found: dict[Tensor, tuple[dict[str, Any], str]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                found.setdefault(buffer, (module._buffers, name))
        kept = {buffer: place for buffer, place in found.items() if not buffer.is_complex()}
        self._floats = [place for buffer, place in kept.items() if buffer.is_floating_point()]
        self._others = [place for buffer, place in kept.items() if not buffer.is_floating_point()]
        self._shapes = [held[name].shape for held, name in (*self._floats, *self._others)]
        self._is_unchecked = True
        self._flat = [_joined(kind) for kind in self.kinds]
        places = (self._floats, self._others)
        self._watched = [[(held, name, held[name].data_ptr()) for held, name in kind] for kind in places]
        """Place of each buffer of a kind, and its address there."""

    def check(self, model: nn.Module) -> None:
        """Refuse buffers that a pass has given another size, or registered.

        Args:
            model: the model, whose modules are looked through in the first call alone.

        Raises:
            TrainingError: there are such buffers.
        """
        if self._is_unchecked:
            self._is_unchecked = False
            if len(self._shapes) != len({id(buffer) for buffer in model.buffers() if not buffer.is_complex()}):
                raise TrainingError(_FIXED)
        if [held[name].shape for held, name in (*self._floats, *self._others)] != self._shapes:
            raise TrainingError(_FIXED)

    def flat(self, kind: int) -> Tensor | None:
        """Return all buffers of a kind (0: floating-point, 1: others) as one tensor; None if they are not, or no
        longer, one.
        """
        for held, name, address in self._watched[kind]:
            if held[name].data_ptr() != address:
                return None
        return self._flat[kind]

    @property
    def kinds(self) -> tuple[list[Tensor], list[Tensor]]:
        """The present floating-point buffers, and the others."""
        floats, others = ([held[name] for held, name in places] for places in (self._floats, self._others))
        return floats, others


class Buffers:
    """The buffers as a server keeps them: floating-point ones in one flat float64 tensor, others in an int64 one."""

    def __init__(self, floats: Tensor, integers: Tensor) -> None:
        self.floats = floats
        self.integers = integers

    @classmethod
    def of(cls, model: nn.Module | BufferPlaces) -> Buffers:
        """Return a copy of the model's buffers."""
        places = _places(model)
        return cls(_values(places, 0, torch.float64), _values(places, 1, torch.int64))

    def add(self, push: BufferPush) -> None:
        """Add the change that some shares made."""
        self.floats += push.floats
        torch.maximum(self.integers, push.integers, out=self.integers)

    def copy(self) -> Buffers:
        return Buffers(self.floats.clone(), self.integers.clone())

    @torch.no_grad()
    def write_to(self, model: nn.Module | BufferPlaces) -> None:
        """Copy these values into the model's buffers."""
        places = _places(model)
        for index, values in enumerate((self.floats, self.integers)):
            if (flat := places.flat(index)) is not None:
                flat.copy_(values)
                continue
            kind = places.kinds[index]
            for part, buffer in zip(unflatten(values, kind), kind, strict=True):
                buffer.copy_(part)

    def change_of(self, model: nn.Module | BufferPlaces, weight: float) -> BufferPush:
        """Return the change that the model's forward passes have made since its buffers had these values.

        Args:
            model: model of the worker.
            weight: num_samples / batch_samples of the share.
        """
        now = Buffers.of(model)
        if (now.floats.shape, now.integers.shape) != (self.floats.shape, self.integers.shape):
            raise TrainingError(_FIXED)
        return BufferPush(now.floats.sub_(self.floats).mul_(weight), now.integers)


class SharedBuffers:
    """A model's buffers next to the buffers that several workers change in shared memory.

    `read` and `add` do the same as `Buffers.write_to`, `change_of` and `add`, bit for bit. They are called once per
    share, and numpy's operations on these few values take a fraction of the time of torch's.
    """

    def __init__(self, places: BufferPlaces, shared: Buffers) -> None:
        """
        Args:
            places: places of the worker's model, on the CPU.
            shared: buffers of all workers.
        """
        self._places, self._shared = places, shared
        self._arrays = (shared.floats.numpy(), shared.integers.numpy())
        self._held = Buffers(shared.floats.clone(), shared.integers.clone())
        """Values at the last `read`."""
        self._before, self._change = self._held.floats.numpy(), np.empty_like(self._arrays[0])
        self._flats = [_array(places.flat(kind)) for kind in range(2)]

    def read(self) -> None:
        """Set the model's buffers to the present shared ones."""
        floats, integers = self._arrays
        np.copyto(self._before, floats)
        own_floats, own_integers = self._own
        if own_floats is None or own_integers is None:
            self._held.integers.copy_(self._shared.integers)
            self._held.write_to(self._places)
            return
        np.copyto(own_floats, self._before, casting="same_kind")
        np.copyto(own_integers, integers)

    def add(self, weight: float) -> None:
        """Add the change that the model's forward passes have made since `read`.

        Args:
            weight: num_samples / batch_samples of the share.
        """
        floats, integers = self._arrays
        own_floats, own_integers = self._own
        if own_floats is None or own_integers is None:
            self._shared.add(self._held.change_of(self._places, weight))
            return
        np.subtract(own_floats, self._before, out=self._change)
        np.multiply(self._change, weight, out=self._change)
        np.add(floats, self._change, out=floats)
        np.maximum(integers, own_integers, out=integers)

    @property
    def _own(self) -> list[np.ndarray | None]:
        """The model's buffers of each kind as one array; None if they are not, or no longer, one tensor of a dtype
        numpy has.
        """
        return [None if self._places.flat(kind) is None else array for kind, array in enumerate(self._flats)]


def _array(flat: Tensor | None) -> np.ndarray | None:
    known = (torch.float32, torch.float64, torch.int64)
    return None if flat is None or flat.dtype not in known else flat.numpy()


def _places(model: nn.Module | BufferPlaces) -> BufferPlaces:
    return model if isinstance(model, BufferPlaces) else BufferPlaces(model)


@torch.no_grad()
def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Make tensors views of one tensor and return it; None if their dtypes or devices differ, or there are none."""
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        return None
    flat = flatten(tensors)
    for part, tensor in zip(unflatten(flat, tensors), tensors, strict=True):
        tensor.data = part
    return flat


def _values(places: BufferPlaces, kind: int, dtype: torch.dtype) -> Tensor:
    """Return a copy of all buffers of a kind."""
    if (flat := places.flat(kind)) is not None:
        return flat.to(dtype, copy=True)
    parts = [tensor.detach().reshape(-1).to(dtype) for tensor in places.kinds[kind]]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

"""A meter of activation memory: bytes of the tensors that autograd keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationMeter:
    """A counter of the bytes of tensors saved for the backward pass, and of their peak.

    A storage counts once, however many tensors share it, for as long as one of them is kept. Parameters, buffers and
    the batch do not count: they exist anyway. What a kernel needs only while it runs does not count either.

    Watching costs some microseconds for each saved tensor. By default the first step and one step in a hundred are
    watched. The meter works on one thread: the one that runs the forward passes.
    """

    def __init__(self, model: nn.Module | Callable[[], Iterable[Tensor]], every_steps: int = 100) -> None:
        """
        Args:
            model: the model, whose parameters and buffers do not count; or a function that returns the tensors that
                do not count.
            every_steps: one step in this many is watched.
        """
        if every_steps < 1:
            raise ValueError(f"every_steps must be >= 1, got {every_steps}")
        self._model = model
        self.every_steps = every_steps
        """Number of steps of which one is watched."""
        self._has_watched = False
        self._is_on = False
        self._uncounted: dict[int, Tensor] = {}
        # Maps a storage's address to the number of saved tensors that hold it.
        self._holders: dict[int, int] = {}
        self._live_bytes = 0
        self._peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes kept now, of those that were saved while watching."""
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes kept at once; 0 before the first watched step."""
        return self._peak_bytes

    def reset(self) -> None:
        """Forget the peak; the next one starts at what is kept now."""
        self._peak_bytes = self._live_bytes

    def is_due(self, step: int) -> bool:
        """Return True if `step`, counted from 1, is one to watch."""
        return not self._has_watched or (step - 1) % self.every_steps == 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Wrap the forward and backward passes of a step; watch it if it is due, and yield True if so."""
        if not self.is_due(step):
            yield False
            return
        with self.watching():
            yield True

    @contextlib.contextmanager
    def watching(self, *batch: Tensor) -> Iterator[None]:
        """Watch the passes inside; `batch` does not count."""
        self._has_watched = True
        self._is_on = True
        tensors = self._model() if not isinstance(self._model, nn.Module) else _tensors_of(self._model)
        self.leave_out(*tensors, *batch)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._is_on = False
            self._uncounted.clear()

    def leave_out(self, *batch: Tensor) -> None:
        """Exclude tensors while watching: those of the batch, or ones kept for another reason."""
        if self._is_on:
            # Held until the end of the step: the address of a freed storage could be used again.
            self._uncounted.update((_address(tensor), tensor) for tensor in batch)

    def track(self, tensor: Tensor) -> object | None:
        """Count a tensor for as long as the returned token exists; return None when nothing is watched.

        For code that keeps tensors for the backward pass by other means than autograd's.
        """
        if not self._is_on or tensor.layout is not torch.strided:  # a sparse one has no storage
            return None
        address = _address(tensor)
        base = tensor._base
        if address in self._uncounted or isinstance(tensor if base is None else base, nn.Parameter):
            return None
        num_bytes = tensor.untyped_storage().nbytes()
        held = self._holders.get(address, 0)
        self._holders[address] = held + 1
        if not held:
            self._live_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return _Token(self, address, num_bytes)

    def release(self, address: int, num_bytes: int) -> None:
        """Stop counting a storage whose token is gone, unless another token holds it."""
        held = self._holders[address] - 1
        if held:
            self._holders[address] = held
        else:
            del self._holders[address]
            self._live_bytes -= num_bytes

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor.detach(), self.track(tensor))  # with its graph it would hold itself


class _Token:
    """A token whose deletion ends the counting of a saved tensor."""

    __slots__ = ("_address", "_meter", "_num_bytes")

    def __init__(self, meter: ActivationMeter, address: int, num_bytes: int) -> None:
        self._meter = meter
        self._address = address
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        self._meter.release(self._address, self._num_bytes)


class _Saved:
    """A tensor that autograd keeps while a step is watched."""

    __slots__ = ("tensor", "token", "version")

    def __init__(self, tensor: Tensor, token: object | None) -> None:
        self.tensor = tensor
        self.token = token
        self.version = tensor._version


def _unpack(saved: Any) -> Tensor:
    tensor: Tensor = saved.tensor
    if tensor._version != saved.version:  # autograd's own check, which hooks turn off
        raise RuntimeError(
            f"one of the variables needed for gradient computation, of shape {tuple(tensor.shape)}, has been modified "
            f"by an inplace operation: it is at version {tensor._version}, wanted {saved.version}"
        )
    return tensor


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address

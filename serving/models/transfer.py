"""The transfer of batches to a model's device, and of answers back. Imports torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from orchestray.serving.models.device import CudaAccelerator
from orchestray.serving.models.signature import Tensors, TensorSpec

Rest = TypeVar("Rest")
_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
Forward = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Rest]]
"""A function of inputs by name, [size, ...], to outputs by name and whatever else there is of the CPU."""

_NUM_IN_FLIGHT = 2
_FLOATS = {torch.float32, torch.float64}
_ALIGNMENT_BYTES = 256
"""Boundary at which each tensor begins in a buffer, as in torch's own allocator: kernels read whole lines."""


class HostTransfer:
    """The way to a model on the CPU: a batch is stacked in place, and copied only once."""

    num_in_flight = 1
    """Number of batches that may be run at once, each by a thread."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def run(self, samples: Sequence[Tensors], size: int, forward: Forward[Rest]) -> tuple[Tensors, Rest]:
        """Return the answers to samples of one shape as arrays, [samples, ...], in dtypes that numpy supports.

        Args:
            samples: tensors of each sample by name.
            size: rows of the batch; rows beyond the samples repeat the first one, and their answers are left out.
            forward: computes the answers; one call at a time.
        """
        batch = {}
        for spec in self._specs:
            batch[spec.name] = torch.empty((size, *samples[0][spec.name].shape), dtype=getattr(torch, spec.dtype))
            _stack(spec, samples, batch[spec.name])
        outputs, rest = forward(batch)
        # Copies: a model may return memory of its own, to which its next batch writes before these are sent.
        return {name: as_numpy_has_it(each)[: len(samples)].numpy().copy() for name, each in outputs.items()}, rest


class StreamedTransfer:
    """The way to a model on an accelerator: two batches are in flight, one computed while the other is copied.

    Each batch has a slot with pinned memory and memory of the device. Copies have streams of their own: the model's
    stream waits for the inputs, and the stream of answers for the model, by events. The CPU waits for nothing but the
    answers; only then does the slot take the next batch.

    Args:
        specs: inputs of the model.
        accelerator: its device.
    """

    num_in_flight = _NUM_IN_FLIGHT

    def __init__(self, specs: Sequence[TensorSpec], accelerator: CudaAccelerator) -> None:
        self._specs = specs
        self._accelerator = accelerator
        self._copying_in, self._computing, self._copying_out = map(accelerator.stream, ("inputs", "model", "answers"))
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(_NUM_IN_FLIGHT):
            self._slots.put(_Slot(accelerator))
        self._launching = threading.Lock()

    def run(self, samples: Sequence[Tensors], size: int, forward: Forward[Rest]) -> tuple[Tensors, Rest]:
        slot = self._slots.get()
        try:
            sent = self._stacked(slot, samples, size)
            with self._launching:  # the work of a batch is not mixed with that of another, and batches keep their order
                answers, rest = self._launched(slot, sent, len(samples), forward)
            slot.answered.synchronize()
            # The next batch writes to the same memory.
            return {name: np.array(each.numpy()) for name, each in answers.items()}, rest
        except BaseException:
            self._finish(slot)
            raise
        finally:
            slot.outputs = {}
            self._slots.put(slot)

    def _stacked(self, slot: _Slot, samples: Sequence[Tensors], size: int) -> dict[str, Tensor]:
        kinds = {spec.name: ((size, *samples[0][spec.name].shape), getattr(torch, spec.dtype)) for spec in self._specs}
        sent = slot.sent.views(kinds)
        for spec in self._specs:
            _stack(spec, samples, sent[spec.name])
        return sent

    def _launched(
        self, slot: _Slot, sent: Mapping[str, Tensor], num_samples: int, forward: Forward[Rest]
    ) -> tuple[dict[str, Tensor], Rest]:
        """Launch a batch, and return the memory of its answers, which are there when `slot.answered` is.

        Args:
            slot: the batch's.
            sent: inputs in pinned memory.
            num_samples: rows that are answered.
            forward: computes the answers.
        """
        device = self._accelerator
        with device.on(self._copying_in):
            inputs = slot.inputs.views(_kinds(sent))
            for name, host in sent.items():
                device.copy(inputs[name], host)
            slot.arrived.record(self._copying_in)
        self._computing.wait_event(slot.arrived)
        with device.on(self._computing):
            outputs, rest = forward(inputs)
            # Held by the slot until the copies have ended: freed before, its memory would be the model's again.
            slot.outputs = {name: as_numpy_has_it(each)[:num_samples] for name, each in outputs.items()}
            slot.computed.record(self._computing)
        self._copying_out.wait_event(slot.computed)
        answers = slot.received.views(_kinds(slot.outputs))
        with device.on(self._copying_out):
            for name, each in slot.outputs.items():
                device.copy(answers[name], each)
            slot.answered.record(self._copying_out)
        return answers, rest

    def _finish(self, slot: _Slot) -> None:
        """Wait for all that a batch that failed has launched: the slot's memory is in use until then."""
        for stream in (self._copying_in, self._computing, self._copying_out):
            slot.answered.record(stream)
            slot.answered.synchronize()


class _Slot:
    """The memory and the events of one batch in flight."""

    def __init__(self, accelerator: CudaAccelerator) -> None:
        self.sent = _Buffer(accelerator.pinned)
        self.inputs = _Buffer(accelerator.memory)
        self.received = _Buffer(accelerator.pinned)
        self.outputs: dict[str, Tensor] = {}
        self.arrived, self.computed, self.answered = (accelerator.event() for _ in range(3))


class _Buffer:
    """Memory for tensors that change from batch to batch; it grows to what the largest batch needs, and is reused."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = allocate(0)

    def views(self, kinds: Mapping[str, _Kind]) -> dict[str, Tensor]:
        """Return a tensor of each kind, in memory that the next call gives out again."""
        places, end = {}, 0
        for name, (shape, dtype) in kinds.items():
            places[name] = slice(end, end + math.prod(shape) * dtype.itemsize)
            end = -(-places[name].stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end > len(self._memory):
            self._memory = self._allocate(end)
        return {name: self._memory[places[name]].view(dtype).view(shape) for name, (shape, dtype) in kinds.items()}


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, _Kind]:
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


def _stack(spec: TensorSpec, samples: Sequence[Tensors], into: Tensor) -> None:
    rows = [sample[spec.name] for sample in samples]
    np.stack([*rows, *[rows[0]] * (len(into) - len(rows))], out=into.numpy())


def as_numpy_has_it(tensor: Tensor) -> Tensor:
    """Return a tensor without gradients, dense, in a dtype that numpy supports."""
    tensor = tensor.detach().to_dense().resolve_neg()
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in _FLOATS else tensor

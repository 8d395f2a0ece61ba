"""The measured cost of each layer: a real micro-batch goes through the model, layer by layer, forward and back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.core.buffers import BufferCopies
from orchestray.trainers.core.rng import generators_put_back
from orchestray.trainers.parallel.pipeline.layers import Layers
from orchestray.trainers.parallel.pipeline.stage import Stage


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one micro-batch, in training."""

    forward_s: float
    """Seconds of the forward pass."""
    backward_s: float
    """Seconds of the backward pass; the last layer's include those of the loss."""
    parameter_bytes: int
    """Bytes of its parameters; a parameter that an earlier layer has as well is counted there."""
    activation_bytes: int
    """Bytes saved for its backward pass, without parameters and buffers; each storage counts in the first layer that
    saves it.
    """
    received_bytes: int
    """Bytes that it saves and an earlier layer has saved: a stage that begins with it holds them as well."""
    loss_bytes: int
    """Bytes that the loss saves; 0 before the last layer."""
    boundary_bytes: int
    """Bytes of the values that travel on if the pipeline is cut after this layer; 0 after the last."""
    num_parameters: int = 0
    """Number of its parameters, as tensors, that are counted in `parameter_bytes`."""

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward; a stage costs the sum over its layers."""
        return self.forward_s + self.backward_s


def profile_layers(
    layers: Layers,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    *,
    repeats: int = 3,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[LayerCost]:
    """Measure the layers with a micro-batch; the times are medians over the repeats.

    The model, its buffers and gradients, and torch's random state are the same afterwards. Hooks of its modules run.

    Args:
        layers: layers of a model in the modes of training, on the device it is to run on.
        inputs: the model's inputs.
        loss: function from the model's outputs to a scalar.
        repeats: number of measured passes.
        warm_up: number of passes before them.
        clock: returns the time in seconds.
    """
    if repeats < 1:
        raise ValueError(f"there must be at least one pass to measure, got {repeats}")
    stages = [layers.part(index, index + 1) for index in range(len(layers))]
    tensors = layers.form.tensors(inputs)
    with _untouched(layers.model):
        for _ in range(warm_up):
            _measure(stages, tensors, loss, clock)
        passes = [_measure(stages, tensors, loss, clock) for _ in range(repeats)]
    return [
        replace(
            costs[0],
            forward_s=median(cost.forward_s for cost in costs),
            backward_s=median(cost.backward_s for cost in costs),
            parameter_bytes=sum(parameter.nbytes for parameter in own),
            num_parameters=len(own),
        )
        for own, costs in zip(_own_parameters(stages), zip(*passes, strict=True), strict=True)
    ]


def _measure(
    stages: Sequence[Stage], inputs: Sequence[Tensor], loss: Callable[[Any], Tensor], clock: Callable[[], float]
) -> list[LayerCost]:
    """Measure one pass. Each layer's inputs are leaves, so that its backward pass stops there."""
    costs: list[LayerCost] = []
    taken: list[tuple[Any, ...]] = []
    given: list[tuple[Any, ...]] = []
    values: tuple[Any, ...] = tuple(tensor.detach().clone() for tensor in inputs)
    device = inputs[0].device
    saved = _Saved([tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())])
    for stage in stages:
        taken.append(values)
        with saved.by_layer():
            begin_s = _now_s(device, clock)
            outputs = stage(*values)
            forward_s = _now_s(device, clock) - begin_s
        given.append(outputs)
        is_last = stage is stages[-1]
        boundary_bytes = 0 if is_last else sum(value.nbytes for value in outputs)
        costs.append(LayerCost(forward_s, 0.0, 0, saved.new_bytes, saved.known_bytes, 0, boundary_bytes))
        if not is_last:
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
    begin_s = _now_s(device, clock)
    with saved.by_layer():
        given[-1] = (loss(given[-1][0]),)
    costs[-1] = replace(costs[-1], loss_bytes=saved.new_bytes)
    gradients: list[Tensor | None] = [torch.ones_like(given[-1][0])]
    for index in reversed(range(len(stages))):
        gradients = _back(given[index], gradients, [*stages[index].parameters()], taken[index])
        end_s = _now_s(device, clock)
        costs[index] = replace(costs[index], backward_s=end_s - begin_s)
        begin_s = end_s
    return costs


def _back(
    given: Sequence[Tensor], gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], taken: Sequence[Any]
) -> list[Tensor | None]:
    """Go back through one layer, and return the gradients of its inputs. No `.grad` is changed."""
    pairs = zip(given, gradients, strict=True)
    ends = [(value, gradient) for value, gradient in pairs if value.requires_grad and gradient is not None]
    wanted = [value for value in (*taken, *parameters) if isinstance(value, Tensor) and value.requires_grad]
    found: dict[int, Tensor | None] = {}
    if ends and wanted:
        values, starts = zip(*ends, strict=True)
        results = torch.autograd.grad(values, wanted, starts, allow_unused=True)
        found = {id(value): result for value, result in zip(wanted, results, strict=True)}
    return [found.get(id(value)) for value in taken]


class _Saved:
    """A counter of the bytes that a layer saves for backward, each storage once."""

    def __init__(self, others: Sequence[Tensor]) -> None:
        self._uncounted = {_memory(tensor) for tensor in others}
        self._by_earlier: set[Any] = set()
        self._by_this: set[Any] = set()
        self.new_bytes = self.known_bytes = 0
        """Bytes that only this layer has saved, and those that an earlier one has saved too."""

    @contextlib.contextmanager
    def by_layer(self) -> Iterator[None]:
        """Count what the next layer saves inside."""
        self._by_earlier |= self._by_this
        self._by_this.clear()
        self.new_bytes = self.known_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        memory, num_bytes = _memory(tensor), tensor.untyped_storage().nbytes()
        if memory not in self._uncounted and memory not in self._by_this:
            self._by_this.add(memory)
            is_known = memory in self._by_earlier
            self.new_bytes += 0 if is_known else num_bytes
            self.known_bytes += num_bytes if is_known else 0
        return tensor


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _own_parameters(stages: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each stage that none before it has."""
    seen: set[int] = set()
    found = []
    for stage in stages:
        own = [parameter for parameter in stage.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        found.append(own)
    return found


def _now_s(device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and every random state afterwards."""
    buffers = BufferCopies(model)
    buffers.take()
    try:
        with generators_put_back(), torch.enable_grad():
            yield
    finally:
        buffers.put_back()

"""The times of the layers of a model in its steps, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from orchestray.platform.data.nested import tensors_in


class LayerTimes:
    """Hooks that take the time of each layer's passes, and keep the inputs of convolutions.

    The backward pass of a layer lasts from the gradient of its output to the last of those that it makes: of its inputs
    and of its parameters.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        """
        Args:
            layers: modules by name. One that has others within it is measured by those.
        """
        self._layers = {
            name: module for name, module in layers.items() if not any(other.startswith(f"{name}.") for other in layers)
        }
        self.inputs: dict[str, Tensor] = {}
        """First input of each."""
        self._forward_s: dict[str, list[float]] = {}
        self._backward_s: dict[str, list[float]] = {}
        self._is_on = False
        self._began_s: dict[str, float] = {}
        self._open: dict[str, tuple[float, float]] = {}
        """Begin of each backward pass of this step, and the end of what it has made so far."""

    @property
    def forward_s(self) -> dict[str, float]:
        """Median seconds of each forward pass."""
        return {name: median(times) for name, times in self._forward_s.items()}

    @property
    def backward_s(self) -> dict[str, float]:
        """Median seconds of each backward pass.

        Layers that make no gradient have none, nor has one whose output is a view that the next layer changes in place:
        torch drops what watches it.
        """
        return {name: median(times) for name, times in self._backward_s.items()}

    def convolutions(self) -> Iterator[tuple[str, nn.Conv2d]]:
        """Yield the convolutions that every algorithm is written for."""
        for name, module in self._layers.items():
            plain = isinstance(module, nn.Conv2d) and module.stride == module.dilation == (1, 1) and module.groups == 1
            if plain and isinstance(module, nn.Conv2d) and not isinstance(module.padding, str) and name in self.inputs:
                yield name, module

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have hooks on the layers while the context is open."""
        hooks = []
        for name, module in self._layers.items():
            made = partial(self._made, name)
            hooks += [
                module.register_forward_pre_hook(partial(self._begin, name)),
                module.register_forward_hook(partial(self._end, name)),
                *(
                    each.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]
                    for each in module.parameters()
                    if each.requires_grad
                ),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def step(self, *, counts: bool) -> Iterator[None]:
        """Take the times of a step, if it counts."""
        self._is_on = counts
        yield
        for name in [*self._open]:
            self._close(name)

    def _begin(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs and isinstance(inputs[0], Tensor):
            self.inputs[name] = inputs[0].detach()
        # Each of them once: an attention looks whether its query is its key.
        own = {id(each): self._entered(name, module, each) for each in inputs if _has_gradient(each)}
        inputs = tuple(own.get(id(each), each) for each in inputs)
        self._began_s[name] = perf_counter()
        return inputs

    def _entered(self, name: str, module: nn.Module, tensor: Tensor) -> Tensor:
        """Return an input as the layer alone has it, whose gradient is there when the layer has made it."""
        if not getattr(module, "inplace", False):
            tensor = tensor.view_as(tensor)
        tensor.register_hook(partial(self._made, name))  # type: ignore[no-untyped-call]
        return tensor

    def _end(self, name: str, _: nn.Module, _inputs: Any, outputs: Any) -> None:
        if self._is_on:
            self._forward_s.setdefault(name, []).append(perf_counter() - self._began_s[name])
        for each in tensors_in(outputs):
            if _has_gradient(each):
                each.register_hook(partial(self._reached, name))  # type: ignore[no-untyped-call]

    def _reached(self, name: str, _: Tensor) -> None:
        """Note that the gradient of an output is there."""
        self._close(name)  # of an earlier call of the same layer
        now_s = perf_counter()
        self._open[name] = (now_s, now_s)

    def _made(self, name: str, _: Tensor) -> None:
        """Note that a gradient of an input or a parameter is there."""
        if name in self._open:
            self._open[name] = (self._open[name][0], perf_counter())

    def _close(self, name: str) -> None:
        began_s, ended_s = self._open.pop(name, (0.0, 0.0))
        if self._is_on and ended_s > began_s:
            self._backward_s.setdefault(name, []).append(ended_s - began_s)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad

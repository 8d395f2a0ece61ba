"""Fully connected layers whose inputs and errors are captured during the forward and backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from orchestray.platform.comm.flat_tensors import flatten

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Tolerance of a recomposed gradient against autograd's, relative to the norm; half precision has its own."""
_HALF_TOLERANCE = 5e-2


class FullyConnected:
    """A layer whose factors (inputs and errors) are captured."""

    def __init__(self, name: str, linear: nn.Linear, weight: int, bias: int | None) -> None:
        self.name = name
        self.weight = weight
        """Index of the parameter."""
        self.bias = bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.inputs: list[Tensor] = []
        self.errors: list[Tensor] = []
        self.is_checked = False
        """True if its factors were found to produce its gradient."""
        self.is_refused = False
        """True if they did not, on some replica: the layer is used in another way than by being called."""
        self.way = "gradient"
        """Form in which the last step's gradient was sent: "gradient", "factors" or "store"."""

    def clear(self) -> None:
        self.inputs, self.errors = [], []

    def watch(self, module: nn.Module) -> RemovableHandle:
        """Capture what the module gets and what comes back, until the handle's `remove`."""
        return module.register_forward_hook(self._after_forward, with_kwargs=True)

    def _after_forward(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            inputs = given[0] if given else named["input"]
            output.register_hook(partial(self._capture, inputs.detach()))  # type: ignore[no-untyped-call]

    def _capture(self, inputs: Tensor, error: Tensor) -> None:
        # The gradient of a gradient reaches the parameters by more ways than this one.
        self.is_refused = self.is_refused or torch.is_grad_enabled()
        self.inputs.append(inputs.reshape(-1, self.in_features).to(self.dtype))
        self.errors.append(error.reshape(-1, self.out_features).to(self.dtype))

    @property
    def num_rows(self) -> int:
        return sum(rows.shape[0] for rows in self.inputs)

    def factors(self, device: torch.device) -> Tensor:
        """Return the inputs, then the errors, as one flat tensor on the layer's device."""
        return flatten([torch.empty(0, dtype=self.dtype, device=device), *self.inputs, *self.errors])

    def is_its_gradient(self, gradient: Tensor | None, bias: Tensor | None) -> bool:
        """Return True if the captured factors produce these gradients."""
        if gradient is None:
            return not self.inputs
        if not self.inputs:
            return False
        x, e = torch.cat(self.inputs), torch.cat(self.errors)
        return _is_near(e.T @ x, gradient) and (self.bias is None or (bias is not None and _is_near(e.sum(0), bias)))


def fully_connected_layers(model: nn.Module, parameters: Sequence[Tensor]) -> list[FullyConnected]:
    """Return the layers that may send factors, in the model's order."""
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values() if own is not None)
    layers = []
    for name, module in model.named_modules():
        # Subclasses may use their weight differently (a split layer has only a part of the output's error).
        if type(module) is not nn.Linear or id(module.weight) not in place or uses[id(module.weight)] > 1:
            continue
        bias: Tensor | None = module.bias
        if bias is not None and (id(bias) not in place or uses[id(bias)] > 1):
            continue
        layers.append(FullyConnected(name, module, place[id(module.weight)], None if bias is None else place[id(bias)]))
    return layers


def _is_near(made: Tensor, gradient: Tensor) -> bool:
    tolerance = _TOLERANCE.get(gradient.dtype, _HALF_TOLERANCE)
    return bool((made - gradient).norm() <= tolerance * gradient.norm() + 1e-30)

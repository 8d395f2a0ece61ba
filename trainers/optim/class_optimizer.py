"""An optimizer of `torch.optim`, or a user's own class, behind the interface of `Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.optimizers import Optimizer

_SHAPE = (4, 6)
_CUT = 10
"""Number of elements of the first part of a tensor of `_SHAPE`."""


@dataclass(frozen=True)
class _Traits:
    """Properties of a class, found by letting it make two steps."""

    slots: dict[str, type]
    """Names of the state that it keeps for a parameter, and their types: a tensor, or a number."""
    whole: dict[str, tuple[int, ...]]
    """Shapes of those that do not have the parameter's."""
    is_elementwise: bool
    """True if a part of a parameter moves as it does inside the whole."""


class ClassOptimizer(Optimizer):
    """An optimizer made of a subclass of `torch.optim.Optimizer`."""

    def __init__(self, made: type, arguments: Mapping[str, Any]) -> None:
        """
        Args:
            made: the class.
            arguments: arguments of its constructor besides the parameters, with `lr`.

        Raises:
            ConfigError: it is not an optimizer, refuses the arguments, or cannot make a step from gradients alone.
        """
        super().__init__()
        if not issubclass(made, torch.optim.Optimizer):
            raise ConfigError(f"config: train.optimizer.type: {made.__qualname__} is not a torch.optim.Optimizer")
        self._class, self._arguments = made, dict(arguments)
        self._traits = traits = _traits(self._made)
        self.slots = tuple(traits.slots)
        self.whole_slots = traits.whole
        self.takes_parts = traits.is_elementwise
        self.title = made.__qualname__
        self._held: list[Tensor] = []

    def _made(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = self._class(parameters, **self._arguments)
        except (TypeError, ValueError) as error:
            accepted = [name for name in inspect.signature(self._class).parameters if name not in ("self", "params")]
            raise ConfigError(
                f"config: train.optimizer: {self._class.__qualname__} refuses its arguments: {error}; it takes "
                f"{', '.join(accepted)}"
            ) from error
        return made

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._names = [name for name, _ in named]
        self._templates = [parameter for _, parameter in named]
        self._held = [parameter.detach() for parameter in self._templates]
        self._optimizer = self._made(self._held)

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        for held, parameter, grad in zip(self._held, params, grads, strict=True):
            if held.data_ptr() != parameter.data_ptr():
                held.data = parameter.detach()
            held.grad = grad if grad is None else grad.to(held.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for held in self._held:
            held.grad = None

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        """Do nothing: `step` is the class's own."""

    def state_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, held in zip(self._names, self._held, strict=True):
            for slot, value in self._optimizer.state.get(held, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name}.{slot}"] = value
                elif isinstance(value, int | float):
                    found[f"{name}.{slot}"] = torch.tensor(float(value), dtype=torch.float64)
        return found

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        loaded: dict[Tensor, dict[str, Any]] = {}
        known = set()
        for name, held in zip(self._names, self._held, strict=True):
            there = {slot: tensors[f"{name}.{slot}"] for slot in self.slots if f"{name}.{slot}" in tensors}
            known |= {f"{name}.{slot}" for slot in there}
            if there and len(there) < len(self.slots):
                missing = next(slot for slot in self.slots if slot not in there)
                raise CheckpointError(f"The saved optimizer state lacks {name}.{missing}.")
            for slot, saved in there.items():
                if slot not in self.whole_slots and saved.shape != held.shape:
                    raise CheckpointError(
                        f"The saved optimizer state {name}.{slot} has the shape {tuple(saved.shape)}, and the "
                        f"parameter {tuple(held.shape)}."
                    )
                kind = self._traits.slots[slot]
                value = saved.detach().clone().to(held.device) if kind is Tensor else kind(saved.item())
                loaded.setdefault(held, {})[slot] = value
        if unknown := [key for key in tensors if key not in known]:
            raise CheckpointError(
                f"The saved optimizer state has {unknown[0]!r}, which {self.title} or this model has not. "
                "Go on with the optimizer and the model it was saved with."
            )
        self._optimizer = self._made(self._held)
        self._optimizer.state.update(loaded)


def _traits(make: Any) -> _Traits:
    """Find out what an optimizer keeps, and whether it treats each element alone, by two steps on small tensors.

    Args:
        make: makes the optimizer of some parameters.

    Raises:
        ConfigError: it makes no step from gradients alone.
    """
    start, *gradients = torch.randn(3, *_SHAPE, generator=torch.Generator().manual_seed(0))
    whole = start.clone()
    try:
        state = _two_steps(make, [whole], [[gradient] for gradient in gradients])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"config: train.optimizer: it makes no step from gradients alone ({type(error).__name__}: {error}); an "
            "optimizer that evaluates the loss itself, or wants sparse gradients, cannot be used here"
        ) from error
    flat = torch.randn(5, generator=torch.Generator().manual_seed(0))
    try:
        of_flat: dict[str, Any] | None = _two_steps(make, [flat], [[flat.clone()], [flat.clone()]])
    except Exception:  # noqa: BLE001 - such as one that wants matrices
        of_flat = None
    kept = {slot: value for slot, value in state.items() if isinstance(value, Tensor | int | float)}
    shapes = {slot: tuple(value.shape) if isinstance(value, Tensor) else () for slot, value in kept.items()}
    slots = {slot: Tensor if isinstance(value, Tensor) else type(value) for slot, value in kept.items()}
    other = {slot: shape for slot, shape in shapes.items() if shape != _SHAPE}
    odd = next((slot for slot, shape in other.items() if shape != ()), None)
    if odd is not None or (of_flat is not None and of_flat.keys() != state.keys()):
        raise ConfigError(
            f"config: train.optimizer: its state {odd or 'of a matrix'!r} has neither the shape of its parameter nor "
            "is it a number, so that it cannot be saved and sent in parts; use another optimizer"
        )
    parts = list(start.clone().view(-1).split([_CUT, start.numel() - _CUT]))
    try:
        _two_steps(make, parts, [list(gradient.view(-1).split([_CUT, start.numel() - _CUT])) for gradient in gradients])
        alike = torch.allclose(torch.cat(parts), whole.view(-1), rtol=1e-5, atol=1e-7)
    except Exception:  # noqa: BLE001 - such as one that wants matrices
        alike = False
    return _Traits(slots, other, alike)


@torch.no_grad()
def _two_steps(make: Any, parameters: list[Tensor], gradients: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """Make steps in place; return the state of the first parameter."""
    optimizer = make(parameters)
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if before != after:
        raise ConfigError(
            "config: train.optimizer: it keeps state in its param_groups, which would be lost with a worker; use "
            "another optimizer"
        )
    return dict(optimizer.state.get(parameters[0], {}))

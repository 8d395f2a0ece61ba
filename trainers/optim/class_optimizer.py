"""An optimizer of `torch.optim`, or a user's own class, behind the interface of `Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.process.alike import torch_state
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.sparse import dense

_SHAPE = (4, 6)
_NUM_STEPS = 12
"""Number of steps that show what an optimizer keeps; some begin to keep a value after a few."""
_SAVED = (Tensor, int, float, NoneType)
"""Types of the values of `state[parameter]` that a checkpoint holds."""
_CUT = 10
"""Number of elements of the first part of a tensor of `_SHAPE`."""


@dataclass(frozen=True)
class _Traits:
    """Properties of a class, found by letting it make some steps."""

    slots: dict[str, type]
    """Names of the state that it keeps for a parameter, and their types: a tensor, or a number."""
    at_once: tuple[str, ...]
    """Those that are there from the first step on."""
    whole: dict[str, tuple[int, ...]]
    """Shapes of those that do not have the parameter's."""
    is_elementwise: bool
    """True if a part of a parameter moves as it does inside the whole."""
    mixes_parameters: bool
    """True if a parameter moves otherwise beside others than alone."""


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
        self.takes_parts, self.mixes_parameters = traits.is_elementwise, traits.mixes_parameters
        self.title = made.__qualname__
        self._held: list[Tensor] = []

    def _made(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = self._class(parameters, **self._arguments)
        except (TypeError, ValueError, RuntimeError) as error:
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
        # Each has a version of its own: a pipeline steps on copies of weights while autograd keeps the originals.
        self._held = [parameter.data for parameter in self._templates]
        self._optimizer = self._of_held()

    def _of_held(self) -> torch.optim.Optimizer:
        return self._made(self._held or [torch.zeros(1, 1)])  # torch refuses to make one of no parameters

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        for held, parameter, grad in zip(self._held, params, grads, strict=True):
            if held.data_ptr() != parameter.data_ptr():
                held.data = parameter.detach()
            held.grad = grad if grad is None else dense(grad).to(held.dtype)
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
            missing = next((slot for slot in self._traits.at_once if slot not in there), None)
            if there and missing is not None:
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
        self._optimizer = self._of_held()
        self._optimizer.state.update(loaded)


def _traits(make: Any) -> _Traits:
    """Find out what an optimizer keeps, and what its steps depend on, by steps on small tensors.

    Args:
        make: makes the optimizer of some parameters.

    Raises:
        ConfigError: it makes no step from gradients alone, or keeps what a checkpoint would not hold.
    """
    start, *gradients = torch.randn(1 + _NUM_STEPS, *_SHAPE, generator=torch.Generator().manual_seed(0))
    other = start.flip(0).contiguous()
    try:
        whole, state = _stepped(make, [(start, gradients)])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"config: train.optimizer: it makes no step from gradients alone ({type(error).__name__}: {error}); an "
            "optimizer that evaluates the loss itself, wants sparse gradients or another device cannot be used here"
        ) from error
    try:
        of_flat: dict[str, Any] | None = _stepped(make, [(start.view(-1), [g.view(-1) for g in gradients])])[1]
    except Exception:  # noqa: BLE001 - such as one that wants matrices
        of_flat = None
    kept = {slot: value for slot, value in state.items() if value is not None}
    shapes = {slot: tuple(value.shape) if isinstance(value, Tensor) else () for slot, value in kept.items()}
    slots = {slot: Tensor if isinstance(value, Tensor) else type(value) for slot, value in kept.items()}
    not_cut = {slot: shape for slot, shape in shapes.items() if shape != _SHAPE}
    odd = next((slot for slot, shape in not_cut.items() if shape != ()), None)
    if odd is not None or (of_flat is not None and of_flat.keys() != state.keys()):
        raise ConfigError(
            f"config: train.optimizer: its state {odd or 'of a matrix'!r} has neither the shape of its parameter nor "
            "is it a number, so that it cannot be saved and sent in parts; use another optimizer"
        )
    large = [100.0 * gradient for gradient in reversed(gradients)]
    beside = _stepped(make, [(start, gradients), (other, large)])[0]
    alone = whole + _stepped(make, [(other, large)])[0]
    try:
        parts = [
            _stepped(make, [(start.view(-1)[of], [gradient.view(-1)[of] for gradient in gradients])])[0][0]
            for of in (slice(_CUT), slice(_CUT, None))
        ]
        is_elementwise = _alike([torch.cat(parts)], [whole[0].view(-1)])
    except Exception:  # noqa: BLE001 - such as one that wants matrices
        is_elementwise = False
    at_once = tuple(slot for slot in _stepped(make, [(start, gradients[:1])])[1] if slot in slots)
    return _Traits(slots, at_once, not_cut, is_elementwise, not _alike(beside, alone))


def _alike(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(tensors, others, strict=True))


@torch.no_grad()
def _stepped(make: Any, of_each: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> tuple[list[Tensor], dict[Any, Any]]:
    """Return parameters after steps of one optimizer, and the state that it keeps for the first one.

    Args:
        make: makes the optimizer of some parameters.
        of_each: the start and the gradients of each parameter.

    Raises:
        ConfigError: it keeps what a checkpoint would not hold.
    """
    parameters = [start.clone() for start, _ in of_each]
    optimizer = make(parameters)
    before, random = _kept_elsewhere(optimizer), torch_state()
    for step in zip(*(gradients for _, gradients in of_each), strict=True):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    after = _kept_elsewhere(optimizer)
    if changed := next((name for name in (*before, *after) if before.get(name) != after.get(name)), None):
        raise ConfigError(
            f"config: train.optimizer: it keeps state in {changed}, which would be lost with a worker; use another "
            "optimizer, or one that keeps its state in state[parameter], as tensors and numbers"
        )
    if not torch.equal(random, torch_state()):
        raise ConfigError(
            "config: train.optimizer: it draws random numbers, which would be others on each worker; use another "
            "optimizer"
        )
    return parameters, dict(optimizer.state.get(parameters[0], {}))


def _kept_elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a description of all state that is not a tensor or a number of `state[parameter]`."""
    found = {name: repr(value) for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    for group in optimizer.param_groups:
        found |= {f"param_groups[{name!r}]": repr(value) for name, value in group.items() if name != "params"}
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in optimizer.state.items():
        if key not in parameters:
            found[f"state[{key!r}]"] = repr(value)
        elif odd := [name for name, one in value.items() if not isinstance(one, _SAVED)]:
            found[f"state[parameter][{odd[0]!r}]"] = repr(value[odd[0]])
    return found

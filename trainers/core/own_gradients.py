"""Models that take gradients in their forward pass or their loss, called where nobody else needs gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.buffers import BufferCopies, untouched
from orchestray.trainers.core.parameter_uses import are_returned, noting_uses
from orchestray.trainers.core.rng import generators_put_back
from orchestray.trainers.core.task_calls import loss_of

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch
    from orchestray.platform.task import Batch
    from orchestray.trainers.core.forward import Forward

Result = TypeVar("Result")
_TAKE_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_MARK = "takes_own_gradients"


def wants_gradients(error: RuntimeError) -> bool:
    """Return True for the error of what takes gradients while they are off."""
    return "does not require grad" in str(error)


class WithoutGradients:
    """Calls without gradients, except of what takes gradients itself (forces are minus the gradient of an energy).

    That shows at the first call, which is then made again.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """
        Args:
            model: model that is called, if its buffers may change.
        """
        self._model = model
        self._takes_own: bool | None = None
        """True if what is called takes gradients; None: that is not known yet."""

    def __call__(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Return `function(given)`.

        Args:
            function: what is called.
            given: its argument, in which the first call may change copies of the tensors only.
        """
        if not self._takes_own:
            is_first = self._takes_own is None
            tried = map_tensors(torch.clone, given) if is_first else given
            copies = BufferCopies(self._model) if is_first and self._model is not None else None
            if copies is not None:
                copies.take()
            try:
                with torch.no_grad():
                    result = function(tried)
            except RuntimeError as error:
                if not wants_gradients(error):
                    raise
                self._takes_own = True
                if copies is not None:
                    copies.put_back()
            else:
                self._takes_own = False
                return result
        with torch.enable_grad():
            return function(given)

    def metrics(
        self, forward: Forward, micro_batch: MicroBatch, *, step: int, loss_only: bool = False
    ) -> dict[str, Any]:
        """Return the result of `forward.metrics` with the same arguments."""

        def of(batch: Batch) -> dict[str, Any]:
            return forward.metrics(replace(micro_batch, batch=batch), step=step, loss_only=loss_only)

        return self(of, micro_batch.batch)


class Noting(TorchFunctionMode):
    """A mode that notes that gradients are taken.

    Attributes:
        has_noted: True if there were any.
        taken: those that `torch.autograd.grad` returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_noted = False
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_noted = self.has_noted or func in _TAKE_GRADIENTS
        result = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            self.taken += tensors_in(result)
        return result


def own_gradients(forward: Forward, batch: Batch) -> frozenset[str]:
    """Return which of `forward` and `loss` take gradients in training: the model's forward pass, and the task's loss.

    Both are called once. What `untouched` restores and the generators are as before. What fails takes none: training
    reports it. Modules whose parameters the pass uses from outside are marked, see `parameter_uses`. The kinds of the
    parameters that the loss uses, and has not got from the model, are added. So is `returned` if the model returns
    some, and `writes` if the pass changes some that are not trained.

    Args:
        forward: calls the model, which is not split yet, in the modes of training.
        batch: a micro-batch.

    Raises:
        TrainingError: the forward pass makes a parameter, or writes to one that is trained.
    """
    found: set[str] = set()
    versions = [(name, parameter, parameter._version) for name, parameter in forward.model.named_parameters()]
    built = {name: parameter for name, parameter, _ in versions}
    untrained = _untrained(forward.model)
    try:
        with generators_put_back(), torch.enable_grad(), untouched(forward.model, forward.task):
            copies = [
                (copy, copy._version, own) for copy, own in zip(_untrained(forward.model), untrained, strict=True)
            ]
            with Noting() as noting, noting_uses(forward.model):
                outputs, placed = forward.outputs(map_tensors(torch.clone, batch))
            found |= {"forward"} if noting.has_noted else set()
            found |= {"returned"} if are_returned(forward.model, outputs) else set()
            with Noting() as noting, noting_uses(forward.model, tensors_in(outputs)) as uses, forward.precision():
                loss_of(forward.task, outputs, placed)
            found |= uses.kinds | ({"loss"} if noting.has_noted else set())
            # Torch does not count changes of `.data`, which the values show.
            if any(copy._version != version or not torch.equal(copy, own) for copy, version, own in copies):
                found.add("writes")
    except Exception:  # noqa: BLE001 - the user's code
        return frozenset(found)
    for name, parameter, version in versions:
        if parameter.requires_grad and parameter._version != version:
            raise writes_parameter(name)
    refuse_made(forward.model, built)
    return frozenset(found)


def _untrained(model: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]


def writes_parameter(name: str) -> TrainingError:
    """Return the error of a forward pass that writes to a parameter that is trained."""
    return TrainingError(
        f"The forward pass of the model changes its parameter {name!r} itself, as nn.Embedding(max_norm=...) does. A "
        "worker changes its copy by its own samples, so the copies would differ. Change it in a parametrization "
        "(torch.nn.utils.parametrize), make it a buffer, or train with one worker."
    )


def refuse_made(model: nn.Module, built: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model whose first pass has made parameters.

    Args:
        model: the model after the pass.
        built: its parameters before.

    Raises:
        TrainingError: there is one that is to be trained.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and built.get(name) is not parameter:
            raise makes_parameter(name)


def makes_parameter(name: str) -> TrainingError:
    """Return the error of a forward pass that makes a parameter, which no optimizer knows."""
    return TrainingError(
        f"The forward pass of the model has made the parameter {name!r}, which the training would not move, and which "
        "each worker would draw for itself. Make it in build_model, and have the forward pass change values alone."
    )


def mark(model: nn.Module) -> None:
    """Note in a model that its forward pass takes gradients."""
    vars(model)[_MARK] = True


def is_marked(model: nn.Module) -> bool:
    """Return True if a model is known to take gradients in its forward pass."""
    return bool(vars(model).get(_MARK, False))

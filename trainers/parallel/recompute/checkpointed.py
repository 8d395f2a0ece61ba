"""A part of a forward pass that runs again in the backward pass, so that its activations need not be kept.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 4. Autograd records the
usual graph, but saves placeholders instead of tensors. A second forward pass fills them when the first one is needed.
This is how torch.utils.checkpoint works without reentrance; its first call, however, imports torch._dynamo, which costs
each worker a second. Gradients are bit-identical, those of tied and frozen parameters too, and a backward pass in two
halves works.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from orchestray.platform.errors import TrainingError
from orchestray.platform.process.alike import torch_state
from orchestray.platform.process.gpu import gpus_touched
from orchestray.trainers.core.buffers import BuffersBefore

if TYPE_CHECKING:
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.parallel.recompute.meter import ActivationMeter


class Segment:
    """A function of tensors, made of modules, that keeps only its inputs.

    The second pass draws the same random numbers: from `draw`, and from torch's generators, whose state is restored.
    Buffers that change while the function runs (running statistics) change once. Only first derivatives can be taken
    through it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        draw: RngKey | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        """
        Args:
            name: name of the part of the model, for messages.
            function: the computation; called a second time with the same arguments.
            modules: modules whose buffers it may change.
            draw: key that the random numbers of seeded modules depend on.
            meter: counts the tensors that the second pass restores.
        """
        self.name = name
        self.function = function
        self.draw = draw
        self.meter = meter
        self.owners = [part for module in modules for part in module.modules() if part._buffers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        first = _Pass(self, args, kwargs)
        with saved_tensors_hooks(first.pack, _unpack):
            outputs = self.function(*args, **kwargs)
        first.ended()
        return outputs


class _Enough(BaseException):
    """A signal that ends a second pass once all wanted tensors are restored; no model catches a base exception."""


class _Place:
    """A placeholder for a saved tensor; when it is deleted, the tensor that the second pass put there is freed."""

    __slots__ = ("__weakref__", "shape", "tensor", "token", "whose")

    def __init__(self, whose: _Pass, shape: torch.Size) -> None:
        self.whose = whose
        self.shape = shape
        self.tensor: Tensor | None = None
        self.token: object | None = None


class _Pass:
    """One forward pass through a segment: what is needed to run it again, and the placeholders to fill.

    Autograd holds the placeholders, and they hold the pass; the pass must not hold them.
    """

    def __init__(self, segment: Segment, args: Any, kwargs: Any) -> None:
        self._segment = segment
        leaves, self._structure = tree_flatten((args, kwargs))
        self._others = [None if _is_activation(leaf) else leaf for leaf in leaves]
        self._tensor_at = [index for index, leaf in enumerate(leaves) if _is_activation(leaf)]
        tensors = [leaves[index] for index in self._tensor_at]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]
        # Autograd saves them, so that outer hooks (a meter's, or those of an enclosing segment) see them.
        self._kept: Any = keep(tensors).grad_fn
        self._random = _RandomState(segment.draw, {t.device for t in tensors if t.device.type == "cuda"})
        self._autocast = _autocast_state()
        self._buffers = BuffersBefore(segment.owners)
        self._places: list[weakref.ref[_Place]] = []

    def pack(self, tensor: Tensor) -> _Place | Tensor:
        if not _is_activation(tensor):
            return tensor
        place = _Place(self, tensor.shape)
        self._places.append(weakref.ref(place))
        return place

    def ended(self) -> None:
        """Record the buffers that the first pass changed."""
        self._buffers.keep_changed()

    def again(self) -> None:
        """Fill the placeholders that are still needed."""
        if torch.is_grad_enabled():
            raise TrainingError(
                f"The model takes gradients of gradients through {self._segment.name}, which is computed again in the "
                "backward pass: that gives first derivatives only. Set train.recompute to none."
            )
        wanted = [index for index, place in enumerate(self._places) if place() is not None]
        args, kwargs = self._arguments()
        second = _Second(self, wanted[-1])
        with (
            self._random.again(),
            self._buffers.again(),
            _autocast_again(self._autocast),
            torch.enable_grad(),
            saved_tensors_hooks(second.pack, _never),
            contextlib.suppress(_Enough),
        ):
            self._segment.function(*args, **kwargs)
        if any((place := self._places[index]()) is not None and place.tensor is None for index in wanted):
            raise self._differs()

    def fill(self, index: int, tensor: Tensor) -> None:
        if index >= len(self._places):
            raise self._differs()
        place = self._places[index]()
        if place is None:
            return
        if place.shape != tensor.shape:
            raise self._differs()
        if place.tensor is None:
            place.tensor = tensor.detach()
            meter = self._segment.meter
            place.token = None if meter is None else meter.track(tensor)

    def _arguments(self) -> Any:
        leaves = list(self._others)
        for index, tensor, needs_grad in zip(self._tensor_at, self._inputs(), self._needs_grad, strict=True):
            leaves[index] = tensor.detach().requires_grad_(needs_grad)
        return tree_unflatten(leaves, self._structure)

    def _inputs(self) -> Sequence[Tensor]:
        try:
            kept: Sequence[Tensor] = self._kept.saved_tensors
        except RuntimeError as error:  # autograd's own check, which hooks turn off
            if "inplace" not in str(error):
                raise
            raise self._changed() from error
        if [tensor._version for tensor in kept] != self._versions:
            raise self._changed()
        return kept

    def _changed(self) -> TrainingError:
        return TrainingError(
            f"The input of {self._segment.name}, to be computed again in the backward pass, was changed in place after "
            "it was used. Write the operation that does so without inplace=True (or += and the like), or set "
            "train.recompute to none."
        )

    def _differs(self) -> TrainingError:
        return TrainingError(
            f"{self._segment.name} did something else when computed again in the backward pass. What they compute must "
            "depend on their inputs, parameters and torch's random numbers alone; if that cannot be, set "
            "train.recompute to none."
        )


class _Second:
    """A counter of the tensors that a second pass saves, in the order of the
    first; it ends the pass after the last wanted.
    """

    def __init__(self, first: _Pass, last: int) -> None:
        self._first = first
        self._last = last
        self._next = 0

    def pack(self, tensor: Tensor) -> None:
        if not _is_activation(tensor):
            return
        self._first.fill(self._next, tensor)
        self._next += 1
        if self._next > self._last:
            raise _Enough


def _is_activation(value: object) -> bool:
    """Return True if a value is a tensor that belongs to this pass alone."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _unpack(kept: _Place | Tensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.tensor is None:
        kept.whose.again()
        assert kept.tensor is not None
    return kept.tensor


def _never(_: object) -> Tensor:
    raise TrainingError(
        "The model takes gradients inside its forward pass, in a part that is computed again in the backward pass. Set "
        "train.recompute to none."
    )


class _Keep(torch.autograd.Function):
    """A function that makes autograd save tensors: they are the `saved_tensors` of its result's grad_fn."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing goes back through what keeps tensors")


def keep(tensors: Sequence[Tensor]) -> Tensor:
    """Make autograd save tensors, for as long as the `grad_fn` of the result exists."""
    kept: Tensor = cast(Any, _Keep.apply)(torch.empty(0, requires_grad=True), *(t.detach() for t in tensors))
    return kept


class _RandomState:
    """The state of all random number sources of a pass."""

    def __init__(self, draw: RngKey | None, cuda_devices: set[torch.device]) -> None:
        self._draw = draw
        self._drawn_from = dict(vars(draw)) if draw is not None else {}
        self._cpu = torch_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in cuda_devices}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the pass's random state inside; afterwards restore the current one, as if nothing had been drawn."""
        now = _RandomState(self._draw, set(self._cuda))
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        if self._draw is not None:
            vars(self._draw).update(self._drawn_from)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_state() -> _Autocast:
    kinds = ("cpu", "cuda") if gpus_touched() else ("cpu",)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def _autocast_again(state: _Autocast) -> Iterator[None]:
    if state == _autocast_state():
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield

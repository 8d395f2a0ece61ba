"""A part of a forward pass that is computed again when its backward pass comes, in place of being kept.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 4. The graph that autograd
records is the one it would record anyway; of the tensors it wants to keep there are only places, filled by a second
forward pass when the first of them is asked for (the way of torch.utils.checkpoint without reentrance, whose first call
imports torch._dynamo and so costs each worker a second). So gradients are the same bit for bit, those of tied and
frozen parameters too, and a backward pass in two halves works.
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
from orchestray.trainers.memory.buffers import BuffersBefore

if TYPE_CHECKING:
    from orchestray.trainers.memory.meter import ActivationMeter
    from orchestray.trainers.replica.randomness import Draw


class Segment:
    """A function of tensors, made of modules, that keeps its inputs alone.

    What the function draws at random, it draws again: from `draw`, and from torch's generators as they were. Buffers
    that change while it runs (running statistics) change once. Only first derivatives can be taken through it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        draw: Draw | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        """
        Args:
            name: of the part of the model, for messages.
            function: what is computed; called a second time with the same arguments.
            modules: whose buffers it may change.
            draw: what the random numbers of seeded modules depend on.
            meter: counts what the second pass brings back.
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
    """Ends a second pass that has brought back all that is wanted; a base exception, so that no model catches it."""


class _Place:
    """Where a tensor would be kept; its end is the end of what the second pass put there."""

    __slots__ = ("__weakref__", "shape", "tensor", "token", "whose")

    def __init__(self, whose: _Pass, shape: torch.Size) -> None:
        self.whose = whose
        self.shape = shape
        self.tensor: Tensor | None = None
        self.token: object | None = None


class _Pass:
    """One forward pass through a segment: what is needed to do it again, and the places to be filled then.

    Autograd holds the places, they hold the pass; the pass must not hold them.
    """

    def __init__(self, segment: Segment, args: Any, kwargs: Any) -> None:
        self._segment = segment
        leaves, self._structure = tree_flatten((args, kwargs))
        self._others = [None if _is_activation(leaf) else leaf for leaf in leaves]
        self._tensor_at = [index for index, leaf in enumerate(leaves) if _is_activation(leaf)]
        tensors = [leaves[index] for index in self._tensor_at]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]
        # Kept by autograd, so that hooks around this pass (a meter's, those of a segment it is part of) see them.
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
        """The first pass is over."""
        self._buffers.keep_what_changed()

    def again(self) -> None:
        """Fill the places that are still asked for."""
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
    """Counts the tensors of a second pass, in the order of the first, and ends it after the last one wanted."""

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
    """Whether a value is a tensor that is there for this pass alone."""
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
    """Has autograd keep tensors: they are `saved_tensors` of what made its result."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing goes back through what keeps tensors")


def keep(tensors: Sequence[Tensor]) -> Tensor:
    """Have autograd keep tensors, for as long as what it says made the result exists."""
    kept: Tensor = cast(Any, _Keep.apply)(torch.empty(0, requires_grad=True), *(t.detach() for t in tensors))
    return kept


class _RandomState:
    """What the random numbers of a pass come from."""

    def __init__(self, draw: Draw | None, cuda_devices: set[torch.device]) -> None:
        self._draw = draw
        self._drawn_from = dict(vars(draw)) if draw is not None else {}
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in cuda_devices}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers are those of the pass; afterwards as if nothing had been drawn."""
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
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
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

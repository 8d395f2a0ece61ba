"""The partition of the parameters into shards: their concatenation, cut into ranges of equal size.

Sharded parameter server: Dean et al., "Large Scale Distributed Deep Networks" (2012), section 4.1; ranges of one flat
vector as in Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.parallel.pipeline.balance import balanced
from orchestray.trainers.ps.protocol.grad_into_buffer import make_at_home
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient, runs_of, zero_rows_left_out

_LARGE_BYTES = 64 * 1024
"""Bytes of a gradient from which on avoiding a copy is worth its own overhead."""
ALIGNMENT = 64
"""Number of elements; more than any vector register holds."""


Unit = Literal["element", "parameter", "module"]
"""Smallest part that a shard holds whole: an element, a parameter, or the parameters of a module together."""


@dataclass(frozen=True)
class Slice:
    """A part of one parameter, as its shard holds it."""

    name: str
    """Name of the parameter in the model."""
    start: int
    """First element, in the flattened parameter."""
    stop: int
    """Index after the last element."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    @cached_property
    def key(self) -> str:
        """Name of the part in an optimizer."""
        return f"{self.name}:{self.start}"

    @cached_property
    def num_elements(self) -> int:
        return self.stop - self.start

    @cached_property
    def is_whole(self) -> bool:
        return self.num_elements == math.prod(self.shape)


@dataclass(frozen=True)
class Partition:
    """A partition of parameters, in order and one after the other, into `num_shards` ranges of about the same size."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each parameter."""
    num_shards: int = 1
    unit: Unit = "element"
    """Smallest part that a shard holds whole; the larger it is, the more sizes differ."""

    def __post_init__(self) -> None:
        if self.unit != "element" and self.num_shards > len(self._units):
            what = "parameters, which" if self.unit == "parameter" else "modules, whose parameters"
            raise ConfigError(
                f"strategy.exchange.shards: {self.num_shards} shards cannot share {len(self._units)} {what} "
                f"the optimizer has to see whole; use at most {len(self._units)}, or another optimizer"
            )
        if self.num_shards > self.num_elements:
            raise ConfigError(
                f"strategy.exchange.shards: {self.num_shards} shards cannot share {self.num_elements} parameters; "
                f"use at most {self.num_elements}"
            )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        num_shards: int = 1,
        names: Container[str] | None = None,
        *,
        unit: Unit = "element",
    ) -> Partition:
        """Return the partition of a model's trainable parameters; a tied parameter counts once.

        Args:
            model: model with the parameters.
            num_shards: number of shards.
            names: names of the parameters that count; default: all.
            unit: smallest part that a shard holds whole.

        Raises:
            ConfigError: more shards than units, or elements of parameters.
        """
        parameters = tuple((name, tuple(parameter.shape)) for name, parameter in trainable(model, names))
        return cls(parameters, num_shards, unit)

    @cached_property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Range of each shard in the concatenation, from and up to.

        A parameter is cut only after a multiple of `ALIGNMENT` of its elements, unless shards are very small. The
        optimizers' kernels round the last few elements of a tensor differently, and k shards must equal one bit for
        bit.
        """
        if self.unit != "element":
            sizes = self._units
            ends = [0, *accumulate(sizes)]
            return tuple((ends[first], ends[stop]) for first, stop in balanced(sizes, self.num_shards))
        even = split_evenly(self.num_elements, self.num_shards)
        if self.num_elements < 2 * ALIGNMENT * self.num_shards:
            return tuple(even)
        return tuple(pairwise([0, *(self._aligned(start) for start, _ in even[1:]), self.num_elements]))

    @cached_property
    def _units(self) -> list[int]:
        """Number of elements of each unit, in order: a parameter, or the parameters of a module."""
        key = itemgetter(0) if self.unit == "parameter" else _module_of
        return [sum(math.prod(shape) for _, shape in unit) for _, unit in groupby(self.parameters, key)]

    def _aligned(self, position: int) -> int:
        begin = 0
        for _, shape in self.parameters:
            size = math.prod(shape)
            if position < begin + size:
                return position - (position - begin) % ALIGNMENT
            begin += size
        return position

    def slices(self, shard: int) -> list[Slice]:
        """Return the parts of parameters that a shard owns, in order; none is empty."""
        first, last = self.bounds[shard]
        found, begin = [], 0
        for name, shape in self.parameters:
            size = math.prod(shape)
            start, stop = max(first - begin, 0), min(last - begin, size)
            if start < stop:
                found.append(Slice(name, start, stop, shape))
            begin += size
        return found

    def cut_each(self, gradients: Sequence[Tensor], shard: int) -> list[Tensor]:
        """Return a shard's slices of the parameters' flat tensors, as views."""
        index = {name: position for position, (name, _) in enumerate(self.parameters)}
        return [gradients[index[piece.name]][piece.start : piece.stop] for piece in self.slices(shard)]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return each shard's range of a flat tensor of all parameters, as views."""
        return [flat[start:stop] for start, stop in self.bounds]


def _module_of(parameter: tuple[str, tuple[int, ...]]) -> str:
    return parameter[0].rpartition(".")[0]


def slice_views(slices: Sequence[Slice], flat: Tensor) -> list[Tensor]:
    """Return the view of each slice in a shard's flat tensor: of the parameter's shape if it is whole, else flat."""
    parts = flat.split_with_sizes([piece.num_elements for piece in slices])
    return [part.view(piece.shape) if piece.is_whole else part for piece, part in zip(slices, parts, strict=True)]


def trainable(model: nn.Module, names: Container[str] | None = None) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters with their names, in the model's order; a tied one under its first name.

    Args:
        model: model with the parameters.
        names: names of the parameters that count; default: all.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return named if names is None else [(name, parameter) for name, parameter in named if name in names]


class FlatModel:
    """A model whose trainable parameters are views of one flat tensor, `values`, `[num_elements]`.

    So a worker receives parameters into the model, and sends its gradients, without copying.
    """

    def __init__(self, model: nn.Module, names: Container[str] | None = None) -> None:
        """Change how the parameters are stored; they stay the same objects.

        Args:
            model: model with the parameters.
            names: names of the parameters that servers hold for this worker; default: all.

        Raises:
            TrainingError: there is nothing to train, or parameters differ in dtype or device.
        """
        self._named = trainable(model, names)
        self.values = flatten_parameters(model, names)
        self._gathered = torch.empty(0)
        self._is_gathered = False
        self._parts: dict[str, Tensor] = {}
        """Part of each parameter, in its shape, in the memory of `gradient`; empty until there is such memory."""
        self._at_home: set[str] = set()
        """Parameters whose gradients have been made in their parts of `gradient`."""
        self._restore: list[Callable[[], None]] = []
        self._used: set[str] = set()
        self._sparse: set[str] = set()
        """Parameters that have had a sparse gradient."""
        self._hooks: list[Any] = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._note(name)) for name, parameter in self._named
        ]

    def live_in(self, take: Callable[[Tensor], Tensor]) -> None:
        """Keep `values` and `gradient` in other memory from now on.

        Args:
            take: returns memory for a tensor with the dtype and shape of the given one.
        """
        with torch.no_grad():
            self.values = take(self.values).copy_(self.values)
        _make_views(self.values, [parameter for _, parameter in self._named])
        self._gather_in(take(self.values))

    def look_at(self, values: Tensor) -> None:
        """Make the parameters views of other memory, with the values in it, `[num_elements]`; gradients stay."""
        if values is not self.values:
            self.values = values
            _make_views(values, [parameter for _, parameter in self._named])

    def begin(self) -> None:
        """Clear the gradients before the backward passes of the next share."""
        self._used.clear()
        self._at_home.clear()
        self._is_gathered = False
        for _, parameter in self._named:
            parameter.grad = None

    def make_gradients_at_home(self, model: nn.Module) -> None:
        """Have large linear layers make their gradients in the memory of `gradient`, where they need no copy.

        Callers must not read `gradient` after the next backward pass has begun.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._named}
        for layer in model.modules():
            if not isinstance(layer, nn.Linear) or layer.weight not in names:
                continue
            if layer.weight.numel() * layer.weight.element_size() >= _LARGE_BYTES:
                restore = make_at_home(layer, partial(self._home, names[layer.weight]))
                self._restore += [] if restore is None else [restore]

    def _home(self, name: str) -> Tensor | None:
        if name in self._at_home or name in self._used:
            return None
        self._at_home.add(name)
        if not self._parts:
            self._gather_in(torch.empty_like(self.values))
        return self._parts[name].detach()  # autograd copies a tensor that somebody else refers to

    def _gather_in(self, memory: Tensor) -> None:
        """Make `gradient` in this memory from now on."""
        self._gathered, self._is_gathered = memory, False
        parts = unflatten(memory, [parameter for _, parameter in self._named])
        self._parts = {name: part for (name, _), part in zip(self._named, parts, strict=True)}

    @property
    def gradients(self) -> list[Tensor]:
        """Flat gradient of each parameter, not copied; zeros if it has none."""
        return [
            parameter.detach().new_zeros(parameter.numel())
            if parameter.grad is None
            else (parameter.grad if parameter.grad.layout == torch.strided else parameter.grad.to_dense()).reshape(-1)
            for _, parameter in self._named
        ]

    def runs(self, of: Tensor | None = None) -> RowSparseGradient | None:
        """Return the gradient without the embedding rows that have none; None if no gradient is sparse or this saves
        nothing.

        Args:
            of: sum of gradients, `[num_elements]`, whose zero rows are left out. Default: the present gradients,
                without a dense copy of them.
        """
        if not self._sparse:
            return None
        if of is not None:
            is_sparse = [name in self._sparse for name, _ in self._named]
            return zero_rows_left_out(of, [p.shape for _, p in self._named], is_sparse)
        gradients = [parameter.grad for _, parameter in self._named]
        return runs_of(gradients, [parameter.numel() for _, parameter in self._named], self.values.dtype)

    @property
    def gradient(self) -> Tensor:
        """All gradients, `[num_elements]`: a copy made at the first access, in the same memory each time."""
        if not self._parts:
            self._gather_in(torch.empty_like(self.values))
        if not self._is_gathered:
            parts = [part.view(-1) for part in self._parts.values()]
            moves = [(to, of) for to, of in zip(parts, self.gradients, strict=True) if to.data_ptr() != of.data_ptr()]
            if moves:
                torch._foreach_copy_([to for to, _ in moves], [of for _, of in moves])  # faster than `cat`
            self._is_gathered = True
        return self._gathered

    def hand_over(self, other: Tensor) -> Tensor:
        """Give the memory of `gradient` to the caller; the next gradient is made in `other`.

        Args:
            other: memory of the same kind, `[num_elements]`; it belongs to this model from now on.

        Returns:
            The present gradient, `[num_elements]`.
        """
        given = self.gradient
        self._gather_in(other)
        return given

    def unused(self) -> list[str]:
        """Return the parameters that have had no gradient since `begin`."""
        return [name for name, _ in self._named if name not in self._used]

    def detach(self) -> None:
        """Remove the gradients and the hooks; parameters stay views of `values`."""
        for hook in self._hooks:
            hook.remove()
        for restore in self._restore:
            restore()
        for _, parameter in self._named:
            parameter.grad = None

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout == torch.sparse_coo:
                self._sparse.add(name)
            self._used.add(name)
            self._is_gathered = False

        return note


@torch.no_grad()
def flatten_parameters(model: nn.Module, names: Container[str] | None = None) -> Tensor:
    """Make the trainable parameters views of one flat tensor, in their order, and return it, `[elements]`.

    Args:
        model: model with the parameters.
        names: names of the parameters that count; default: all.

    Raises:
        TrainingError: there is nothing to train, or parameters are complex, or differ in dtype or device.
    """
    named = trainable(model, names)
    if not named:
        raise TrainingError("The model has no trainable parameter, so there is nothing for a parameter server to hold.")
    first = named[0][1]
    for name, parameter in named:
        if parameter.is_complex():
            raise TrainingError(
                f"A parameter server holds real numbers, and {name!r} is {parameter.dtype}. Use another exchange."
            )
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise TrainingError(
                f"A parameter server holds parameters of one kind; {named[0][0]!r} is {first.dtype} on {first.device}, "
                f"{name!r} is {parameter.dtype} on {parameter.device}. Use another exchange, or one dtype."
            )
    parameters = [parameter for _, parameter in named]
    flat = flatten(parameters)
    _make_views(flat, parameters)
    return flat


def _make_views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    for view, parameter in zip(unflatten(flat, parameters), parameters, strict=True):
        parameter.data = view

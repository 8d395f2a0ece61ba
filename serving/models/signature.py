"""The signature of a model: names, types and shapes of its tensors, and checks of a sample. Does not import torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from orchestray.serving.models.errors import InputError
from orchestray.serving.models.json_values import as_numpy
from orchestray.serving.models.padding import Padding

if TYPE_CHECKING:
    from orchestray.trainers.saved.interface import Interface

_log = logging.getLogger("orchestray.serving")

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
"""Arrays of one sample by name, without a batch dimension."""
Sample: TypeAlias = Tensors
Output: TypeAlias = Tensors
Answers: TypeAlias = list[Output | Exception]
"""An answer for each sample of a batch, or why there is none."""
ANY = "object"
"""Type of an input or output that may be any JSON value, in an array without dimensions."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a sample."""

    name: str
    dtype: str
    """Numpy's name of the type: `float32`, `int64`, ..."""
    shape: tuple[int | None, ...]
    """Shape without the batch dimension; None: a dimension of any length, at least 1."""

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    def __str__(self) -> str:
        if self.dtype == ANY:
            return "any JSON value"
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} of shape [{sizes}]" if self.shape else f"one {self.dtype}"

    def takes(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of a sample may have this shape."""
        return len(shape) == len(self.shape) and all(
            mine == size or (mine is None and size > 0) for mine, size in zip(self.shape, shape, strict=True)
        )

    @property
    def is_variable(self) -> bool:
        """True if a dimension may have any length."""
        return None in self.shape


@dataclass(frozen=True)
class Signature:
    """A model from the point of view of its callers.

    A model with one input takes its value alone; with several, a mapping by name.
    """

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example: Any
    """One sample as JSON values, as `parse` takes it."""
    feature_names: Mapping[str, int] = field(default_factory=dict)
    """Maps the names of the numbers of the only input, in order, to how many each has; empty: unknown."""
    class_names: tuple[Any, ...] = ()
    """Names of the classes, in the order of the outputs; empty: unknown, or there are no classes."""
    own_forms: tuple[str, ...] = ()
    """Methods of the task that give requests and answers a form of its own: `decode`, `encode`."""
    padding: Padding | None = None
    """Inputs of variable length; None: every input has one shape."""
    example_request: Any = None
    """Content of a request for one sample, if the task decodes it; None: unknown."""
    computing: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Computation of batches, as JSON values: `device`, `padded_to`, `compiled_by`, `cuda_graphs`; empty: unknown."""

    @cached_property
    def takes_any_value(self) -> bool:
        """True if its inputs may be any JSON values, or are decoded by its task."""
        return "decode" in self.own_forms or any(spec.dtype == ANY for spec in self.inputs)

    @property
    def shown_example(self) -> Any:
        """One sample as a request holds it, for those who look at the endpoint."""
        return self.example_request if "decode" in self.own_forms else self.example

    def parse(self, sample: Any, *, field: str = "inputs") -> Sample:
        """Parse a sample from JSON values or arrays to arrays of the wanted types; integers are accepted for floats.

        Args:
            sample: nested lists of numbers, or an array or a tensor of any library; for several inputs a mapping by
                their names.
            field: name of the sample in errors.

        Raises:
            InputError: names the place, the wanted shape or type, and what came.
        """
        parsed = self._parsed(sample, field)
        return parsed if self.padding is None else self._of_one_length(parsed, self.padding, field)

    def _parsed(self, sample: Any, field: str) -> Sample:
        if len(self.inputs) == 1:
            spec = self.inputs[0]
            return {spec.name: _array(sample, spec, field)}
        if not isinstance(sample, Mapping):
            raise InputError(field, f"an object with {self._input_names}", kind_of(sample))
        for name in sample:
            if all(name != spec.name for spec in self.inputs):
                raise InputError(f"{field}.{name}", f"one of {self._input_names}", "a name the model does not have")
        mask = None if self.padding is None else self.padding.mask
        for spec in self.inputs:
            if spec.name not in sample and spec.name != mask:
                raise InputError(f"{field}.{spec.name}", str(spec), "nothing")
        given = (spec for spec in self.inputs if spec.name in sample)
        return {spec.name: _array(sample[spec.name], spec, f"{field}.{spec.name}") for spec in given}

    def _of_one_length(self, sample: Sample, padding: Padding, field: str) -> Sample:
        """Check that the inputs of variable length have one, and add the mask of a sample that has none."""
        lengths = {name: len(sample[name]) for name in padding.values if name in sample}
        first = next(iter(lengths.values()))
        if wrong := [name for name, length in lengths.items() if length != first]:
            same = f"{next(iter(lengths))}, {first}"
            raise InputError(f"{field}.{wrong[0]}", f"the length of {same}", f"{lengths[wrong[0]]}")
        if padding.most is not None and first > padding.most:
            raise InputError(field, f"a length of {padding.most} at most", f"{first}")
        if (mask := padding.mask) is not None and mask not in sample:
            spec = next(spec for spec in self.inputs if spec.name == mask)
            return {**sample, mask: np.ones(first, spec.numpy_dtype)}
        return sample

    def takes_samples_of(self, other: Signature) -> bool:
        """Return True if this model can run samples that the other has parsed: same names and shapes, similar types.

        A float may have another precision, and an integer is accepted for a float.
        """
        mine, others = ({spec.name: spec for spec in each.inputs} for each in (self, other))
        return mine.keys() == others.keys() and all(
            spec.shape == others[name].shape and np.can_cast(others[name].numpy_dtype, spec.numpy_dtype, "same_kind")
            for name, spec in mine.items()
        )

    def reads_like(self, other: Signature) -> bool:
        """Return True if both make the same sample of a request, so that this model can run what the other has read.

        What a task decodes depends on its code and its data: it is never the same for certain.
        """
        mine, others = ((each.inputs, [*each.feature_names.items()], each.padding) for each in (self, other))
        return mine == others and "decode" not in (*self.own_forms, *other.own_forms)

    def as_taken(self, sample: Sample) -> Sample:
        """Convert a sample that another signature has parsed to the types of this one (see `takes_samples_of`)."""
        return {spec.name: np.asarray(sample[spec.name], spec.numpy_dtype) for spec in self.inputs}

    @property
    def _input_names(self) -> str:
        return ", ".join(spec.name for spec in self.inputs)


def with_interface(signature: Signature, interface: Interface) -> Signature:
    """Return a signature with what a run keeps of its task; names of another number of features are left out."""
    feature_names = interface.feature_names
    num_named = sum(feature_names.values())
    if feature_names and [num_named] != [num_elements(spec) for spec in signature.inputs]:
        inputs = " and ".join(map(str, signature.inputs))
        _log.warning(
            "%s takes %s, but its task's feature_names are of %d numbers: tables of named columns are refused",
            signature.name,
            inputs,
            num_named,
        )
        feature_names = {}
    return replace(
        signature,
        feature_names=dict(feature_names),
        class_names=tuple(interface.class_names),
        own_forms=interface.own_forms,
        example_request=interface.example_request,
    )


def kind_of(value: Any) -> str:
    """Describe a JSON value in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {list(value.shape)}"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def boxed(value: Any) -> np.ndarray[Any, Any]:
    """Return any value in an array without dimensions; `item()` takes it out again."""
    array: np.ndarray[Any, Any] = np.empty((), object)
    array[()] = value
    return array


def _array(value: Any, spec: TensorSpec, field: str) -> np.ndarray[Any, Any]:
    if spec.dtype == ANY:
        return value if isinstance(value, np.ndarray) and value.dtype == object and not value.shape else boxed(value)
    value = as_numpy(value)
    if not isinstance(value, np.ndarray):
        _check_nesting(listed := value, spec, field)
        try:
            value = np.asarray(value)
            if value.dtype.kind == "f" and spec.numpy_dtype.kind in "iu":  # numpy's choice for 2**63 beside 1
                value = np.asarray(listed, spec.numpy_dtype)
        except (ValueError, OverflowError):
            raise InputError(field, str(spec), "numbers that are too large") from None
        if value.size == 0:
            value = value.astype(spec.numpy_dtype)
    if not spec.takes(value.shape):
        raise InputError(field, str(spec), f"the shape {list(value.shape)}")
    return _cast(value, spec, field)


def _cast(array: np.ndarray[Any, Any], spec: TensorSpec, field: str) -> np.ndarray[Any, Any]:
    wanted = spec.numpy_dtype
    if array.dtype == object:
        raise InputError(field, str(spec), "numbers that are too large")
    if array.dtype.kind not in _TAKEN[wanted.kind]:
        raise InputError(field, str(spec), f"values of type {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(wanted, copy=False)
    if wanted.kind == "f" and not np.isfinite(cast).all():
        place = _place(np.argwhere(~np.isfinite(cast))[0])
        raise InputError(f"{field}{place}", "a finite number", "NaN, infinity, or more than the type holds")
    if wanted.kind in "iu" and cast is not array and (wrong := cast != array).any():
        place = _place(np.argwhere(wrong)[0])
        raise InputError(f"{field}{place}", f"a whole number that fits {spec.dtype}", "one that does not")
    return cast


_FLAGS, _WHOLE = {bool, np.bool_}, {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
_TYPES: dict[str, set[type]] = {
    "b": _FLAGS,
    "i": _WHOLE,
    "u": _WHOLE,
    "f": {*_WHOLE, float, *(np.dtype(code).type for code in np.typecodes["Float"])},
}
"""Maps the kind of a type to the types in lists that it accepts: JSON's, and numpy's, which callers in Python have."""
_TAKEN = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
"""Maps the kind of a type to the kinds of values that it accepts."""


def _check_nesting(value: Any, spec: TensorSpec, field: str) -> None:
    """Check that nested lists have the wanted shape, and hold only numbers (or truth values).

    The innermost lists, which hold nearly all values, are checked by C code alone.
    """
    allowed = _TYPES[spec.numpy_dtype.kind]
    if not spec.shape:
        if type(value) not in allowed:
            raise InputError(field, str(spec), kind_of(value))
        return
    for place, part in _innermost(value, spec, field, 0):
        if not allowed.issuperset(map(type, part)):
            index = next(index for index, each in enumerate(part) if type(each) not in allowed)
            got = kind_of(part[index])
            if type(part[index]) is float:
                got = f"the number {part[index]}"
            kind = "true or false" if bool in allowed else "a number" if float in allowed else "a whole number"
            raise InputError(f"{place}[{index}]", f"{kind} (the input is {spec})", got)


def _innermost(value: Any, spec: TensorSpec, place: str, depth: int) -> Iterator[tuple[str, Sequence[Any]]]:
    size = spec.shape[depth]
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if not is_list or (len(value) != size if size is not None else not len(value)):
        whole = depth == 0
        wanted = str(spec) if whole else f"a list of {size} (the input is {spec})"
        batch = whole and _is_batch(value, spec)
        raise InputError(place, wanted, kind_of(value) + (" of those; a request has one sample" if batch else ""))
    if depth + 1 == len(spec.shape):
        yield place, value
        return
    for index, part in enumerate(value):
        yield from _innermost(part, spec, f"{place}[{index}]", depth + 1)


def _is_batch(value: Any, spec: TensorSpec) -> bool:
    """Return True if a value looks like a list of samples, as other servers take it."""
    if not isinstance(value, list | tuple) or not value:
        return False
    first = value[0]
    for size in spec.shape:
        if not isinstance(first, list | tuple) or (size is not None and len(first) != size):
            return False
        first = first[0] if first else None
    return not isinstance(first, list | tuple)


def _place(index: Any) -> str:
    return "".join(f"[{int(each)}]" for each in index)


def num_elements(spec: TensorSpec) -> int:
    """Return the number of elements in one sample's tensor, whose shape is fixed."""
    return math.prod(fixed_shape(spec))


def fixed_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the sizes of a tensor's dimensions that are fixed."""
    return tuple(size for size in spec.shape if size is not None)

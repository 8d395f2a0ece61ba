"""The inputs of a model: one value, several in a tuple or a list, or several by name in a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.errors import TrainingError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model: `model(*inputs)` for a tuple or a list, `model(**inputs)` for a mapping, else `model(inputs)`."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch, as the task made them.

    Raises:
        TrainingError: the batch is not a dictionary with `inputs`.
    """
    if not isinstance(batch, Mapping) or "inputs" not in batch:
        got = f"one of {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise TrainingError(
            "The task's to_batch must return a dictionary whose entry 'inputs' is what the model is called with: a "
            f"tensor, or a tuple or a mapping of several; it returned {got}."
        )
    return batch["inputs"]


def arguments(inputs: Any) -> Arguments:
    """Return the positional and named arguments with which a model is called."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


class InputForm:
    """The form of a model's inputs: their containers, and all that is in them besides tensors.

    Args:
        inputs: inputs of the model.
        are_known: True if inputs of this form have as many dimensions as these; False if they may have any number.

    Attributes:
        names: a name of each tensor: `inputs` if it is the only argument, `inputs_0` and so on, or those of a mapping.
            Names within containers have dots: `image.left`, `inputs_1.0`.
        dims: number of dimensions of each tensor, or None if it may have any.
    """

    def __init__(self, inputs: Any, *, are_known: bool = False) -> None:
        self.names: list[str] = []
        paths, self._structure = pytree.tree_flatten_with_path(_normal(arguments(inputs)))
        self._others = [None if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        self._places = [place for place, (_, leaf) in enumerate(paths) if isinstance(leaf, Tensor)]
        is_alone = len(arguments(inputs)[0]) == 1
        self.names = [_name(paths[place][0], is_alone=is_alone) for place in self._places]
        self.dims = [paths[place][1].dim() if are_known else None for place in self._places]

    def tensors(self, inputs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of inputs of this form.

        Raises:
            TrainingError: the inputs have another form.
        """
        leaves, structure = pytree.tree_flatten(_normal(arguments(inputs)))
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if structure != self._structure or places != self._places or not _same(others, self._others):
            raise TrainingError(
                f"The inputs of this batch, {described(inputs)}, have another form than those of the first row of the "
                "data, after which the model was cut. Give every batch the same containers, the same names, and the "
                "same values besides tensors."
            )
        tensors = tuple(leaves[place] for place in places)
        for name, tensor, wanted in zip(self.names, tensors, self.dims, strict=True):
            if wanted not in (None, tensor.dim()):
                raise TrainingError(
                    f"{name} of this batch has {tensor.dim()} dimensions, and the first row of the data has {wanted}, "
                    "after which the model was cut. Give all batches the same number of dimensions."
                )
        return tensors

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return inputs of this form with other tensors, or with stand-ins for them: a tuple, or a dictionary."""
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return kwargs or args


def described(inputs: Any) -> str:
    """Describe inputs in words, for messages."""
    if isinstance(inputs, Tensor):
        return f"a tensor of shape {list(inputs.shape)}"
    if isinstance(inputs, Mapping):
        return "a mapping of " + ", ".join(f"{name}: {described(value)}" for name, value in inputs.items())
    if isinstance(inputs, tuple | list):
        return f"a {type(inputs).__name__} of " + ", ".join(described(value) for value in inputs)
    return f"a {type(inputs).__name__}"


def _normal(given: Arguments) -> Arguments:
    """Return arguments in containers that torch knows, with names in one order."""
    args, kwargs = given
    return map_tensors(_itself, args), map_tensors(_itself, dict(sorted(kwargs.items())))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _same(ours: Any, theirs: Any) -> bool:
    try:
        return bool(ours == theirs)
    except (RuntimeError, TypeError, ValueError):  # such as arrays, which compare element by element
        return False


def _name(path: Sequence[Any], *, is_alone: bool) -> str:
    kind, first, *rest = [str(_key(entry)) for entry in path]
    start = first if kind == "1" else "inputs" if is_alone else f"inputs_{first}"
    return ".".join([start, *rest])


def _key(entry: Any) -> Any:
    """Return the key of a step of a path: an index, a key of a mapping, or the name of a field."""
    return next(getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name))


ONE_TENSOR = InputForm(torch.empty(0))
"""Form of inputs that are one tensor."""

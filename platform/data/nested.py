"""Tensors in nested containers: what an entry of a batch may be besides a tensor.

Containers are those of torch's pytrees (tuples, lists, dictionaries, named tuples, registered classes), packed
sequences, and mappings of other libraries, which become dictionaries. Anything else is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """Return the same containers with `function(tensor)` instead of each tensor."""
    if isinstance(nested, Tensor):
        return function(nested)

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, PackedSequence):  # its sizes stay on the CPU
            indices = [None if each is None else function(each) for each in leaf[2:]]
            return PackedSequence(function(leaf.data), leaf.batch_sizes, *indices)
        if isinstance(leaf, Mapping):  # of a class that torch does not know
            return {key: map_tensors(function, value) for key, value in leaf.items()}
        return leaf

    return cast(Any, pytree.tree_map(of, nested, is_leaf=_is_packed))


def copied(nested: Any) -> Any:
    """Return the same containers with copies of the tensors; those that need gradients need them there as well."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), nested)


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, nested)
    return found


def _is_packed(nested: Any) -> bool:
    return isinstance(nested, PackedSequence)

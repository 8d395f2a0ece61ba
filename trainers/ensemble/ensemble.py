"""An ensemble: models whose output is the mean of their outputs.

Hansen and Salamon, "Neural Network Ensembles" (1990); Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep
Learning" (2019), section 7.3: f(x) = 1/m sum_i f_(w_i)(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from orchestray.platform.errors import ConfigError, OrchestrayError

Average = Literal["outputs", "probabilities"]
_MOST_DIMS_OF_SEQUENCES = 3


class Ensemble(nn.Module):
    """Members that are called with the same inputs, and the mean of their outputs.

    Args:
        members: models whose outputs have the same shapes.
        average: "outputs": the mean of the outputs, which may be any pytree of tensors; leaves that are not
        floating-point tensors come from the first member. "probabilities": the mean of their softmax over the classes
        (`class_dimension`).
    """

    members: nn.ModuleList

    def __init__(self, members: Iterable[nn.Module], average: Average = "outputs") -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        if not len(self.members):
            raise ValueError("An ensemble needs at least one member.")
        self.average = average

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = [member(*inputs, **named) for member in self.members]
        if self.average == "probabilities":
            outputs = [probabilities(output) for output in outputs]
        return mean_of(outputs)

    def logits(self, *inputs: Any, **named: Any) -> Any:
        """Return outputs whose softmax gives the classes' probabilities.

        These are the outputs of `forward`, or their logarithm if it averages probabilities. Shapes are those of the
        members' outputs.
        """
        outputs = [member(*inputs, **named) for member in self.members]
        return mean_of(outputs) if self.average == "outputs" else log_mean_of(outputs)

    def extra_repr(self) -> str:
        return f"average={self.average}"


def mean_of(outputs: Sequence[Any], mean: Callable[[Tensor], Tensor] = lambda stacked: stacked.mean(0)) -> Any:
    """Return the mean of pytrees of the same structure, leaf by leaf.

    Args:
        outputs: the pytrees, at least one.
        mean: takes the mean over the first dimension, which counts the pytrees.

    Raises:
        OrchestrayError: their structures differ.
    """
    flat, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise OrchestrayError("The members of the ensemble answer with different structures: no mean can be taken.")
    leaves = [_mean(leaves, mean) for leaves in zip(*flat, strict=True)]
    return pytree.tree_unflatten(leaves, structures[0])


def _mean(leaves: Sequence[Any], mean: Callable[[Tensor], Tensor]) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return first
    return mean(torch.stack(list(leaves)))


def log_mean_of(outputs: Sequence[Any]) -> Any:
    """Return the logarithm of the mean of the members' probabilities, leaf by leaf, as outputs of one model.

    It never leaves the logarithms, so that a class whose probability is below the smallest number has its loss, and its
    gradient, as well.

    Raises:
        ConfigError, OrchestrayError: as of `probabilities` and `mean_of`.
    """
    summed = [_each(output, lambda tensor: tensor.log_softmax(_checked_classes(tensor))) for output in outputs]
    return mean_of(summed, lambda stacked: stacked.logsumexp(0) - math.log(len(outputs)))


def probabilities(outputs: Any) -> Any:
    """Return a pytree with the softmax of each floating-point tensor over its classes.

    Raises:
        ConfigError: one has a single class, whose probability is 1 whatever the model answers.
    """
    return _each(outputs, lambda tensor: tensor.softmax(_checked_classes(tensor)))


def _checked_classes(tensor: Tensor) -> int:
    dimension = class_dimension(tensor)
    if tensor.dim() and tensor.shape[dimension] == 1:
        raise ConfigError(
            "config: average: probabilities are a softmax over classes, and the members answer with one number, "
            "whose softmax is always 1; use average: outputs"
        )
    return dimension


def log_of(answer: Any) -> Any:
    """Return a pytree with the logarithm of each floating-point tensor; 0 counts as the smallest normal number."""
    return _each(answer, lambda tensor: tensor.clamp_min(torch.finfo(tensor.dtype).tiny).log())


def class_dimension(outputs: Tensor, targets: Tensor | None = None) -> int:
    """Return the dimension of `outputs` that counts the classes.

    With integer `targets` that have all other dimensions of `outputs`, it is the missing one. Otherwise it is the last
    one of vectors and sequences ([samples, classes], [samples, positions, classes]). For images ([samples, classes,
    height, width]) it is the second one.
    """
    if targets is not None and targets.dim() == outputs.dim() - 1:
        shape = outputs.shape
        fitting = [dim for dim in range(1, outputs.dim()) if (*shape[:dim], *shape[dim + 1 :]) == tuple(targets.shape)]
        by_rule = class_dimension(outputs)
        if fitting:
            return by_rule if by_rule in fitting else fitting[0]
    return outputs.dim() - 1 if outputs.dim() <= _MOST_DIMS_OF_SEQUENCES else 1


def _each(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    def of(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return cast(Any, pytree.tree_map(of, tree))

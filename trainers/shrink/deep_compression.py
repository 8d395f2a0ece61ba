"""Weights that need few bits: the small ones are pruned, and the others share a few values.

Han, Mao and Dally, "Deep Compression" (2016), sections 2 and 3; pruning by Han et al., "Learning both Weights and
Connections for Efficient Neural Networks" (2015), section 3.1. What the values are stored in is a matter of
`orchestray.platform.run.huffman_file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.kept_weights import is_weight

if TYPE_CHECKING:
    from torch import nn

_MOST_ROUNDS = 300
_MOST_VALUES = 256
"""Largest number of values of a tensor that is few-valued as it is."""


def few_valued(model: nn.Module) -> dict[str, Tensor]:
    """Return the few values that quantized layers compute with, by the names of the real weights behind them.

    They can take the place of the real weights: they are left out where quantizing them again gives other ones.
    Small real weights may stand for the largest values, so pruning these would change the model.

    Args:
        model: model in evaluation mode.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList) and module.is_tensor:
            with torch.no_grad():
                values = again = module()
                for quantize in module:
                    again = quantize(again)
            if len(torch.unique(values)) <= _MOST_VALUES and torch.allclose(again, values, rtol=1e-5, atol=0):
                found[f"{path}.original"] = values
    return found


def weights_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a model's weights: parameters of floating-point numbers with two dimensions or more.

    Args:
        model: the model.
        tensors: its saved tensors; weights that are saved in another form are left out.

    Raises:
        CheckpointError: there are none, or some are not finite.
    """
    names = [name for name, each in model.named_parameters() if is_weight(each) and name in tensors]
    if not names:
        raise CheckpointError("the model has no weights of two dimensions or more, which could be made smaller")
    if wrong := [name for name in names if not bool(tensors[name].isfinite().all())]:
        raise CheckpointError(f"the weights of {', '.join(wrong[:5])} are not finite, so they cannot be made smaller")
    return names


def pruned(tensors: Mapping[str, Tensor], names: Iterable[str], sparsity: float) -> dict[str, Tensor]:
    """Return the tensors with the smallest weights set to zero.

    Within a tensor they go by size. Between tensors, the square of a weight counts over the sum of its own and all
    larger squares of its tensor: Lee et al., "Layer-Adaptive Sparsity for the Magnitude-Based Pruning" (2021), section
    3. So the largest weight of a tensor goes last, and small tensors keep a larger part, as first layers need.

    Args:
        tensors: tensors by name.
        names: those whose weights are pruned.
        sparsity: part of all these weights that becomes zero, from 0 to below 1.
    """
    chosen = {name: tensors[name] for name in names}
    if not chosen:
        return dict(tensors)
    sizes = torch.cat([_scores(each) for each in chosen.values()])
    num_pruned = round(sparsity * len(sizes))
    keeps = torch.ones(len(sizes), dtype=torch.bool)
    keeps[sizes.argsort(stable=True)[:num_pruned]] = False
    parts = torch.split(keeps, [each.numel() for each in chosen.values()])
    masked = {
        name: torch.where(part.view(each.shape), each, torch.zeros((), dtype=each.dtype))
        for (name, each), part in zip(chosen.items(), parts, strict=True)
    }
    return {**tensors, **masked}


def _scores(weight: Tensor) -> Tensor:
    """Return the squares of weights over the sums of their own and all larger squares, flat in float64."""
    squares, order = torch.sort(weight.detach().double().reshape(-1).square(), stable=True)
    sums = squares.flip(0).cumsum(0).flip(0)
    return torch.empty_like(squares).index_copy_(0, order, squares / sums.clamp_min(torch.finfo(sums.dtype).tiny))


def with_shared_values(tensors: Mapping[str, Tensor], names: Iterable[str], bits: int) -> dict[str, Tensor]:
    """Return the tensors with at most `2 ** bits` values besides zero in each of those named; zeros stay zero.

    The values are the means of clusters by k-means, which begins with values at equal distances (section 3.2), rounded
    to half precision.

    Args:
        tensors: tensors by name.
        names: those whose values are shared.
        bits: bits of a code, 1 to 8.
    """
    found = dict(tensors)
    for name in names:
        weight = tensors[name]
        shared = weight.clone()
        is_kept = weight != 0
        shared[is_kept] = in_half(clustered(weight[is_kept], 2**bits))
        found[name] = shared
    return found


def clustered(values: Tensor, num_clusters: int) -> Tensor:
    """Return the values [n], each replaced by the mean of its cluster by k-means in one dimension.

    Lloyd's rounds go on until no mean moves. A cluster without values stays where it is.
    """
    if len(torch.unique(values)) <= num_clusters:
        return values
    exact = values.double()
    means = torch.linspace(float(exact.min()), float(exact.max()), num_clusters, dtype=torch.float64)
    codes = torch.bucketize(exact, _between(means))
    for _ in range(_MOST_ROUNDS):
        counts = torch.bincount(codes, minlength=num_clusters)
        sums = torch.zeros(num_clusters, dtype=torch.float64).index_add_(0, codes, exact)
        means = torch.where(counts > 0, sums / counts, means)
        before, codes = codes, torch.bucketize(exact, _between(means))
        if torch.equal(before, codes):
            break
    return means[codes].to(values.dtype)


def _between(means: Tensor) -> Tensor:
    return (means[1:] + means[:-1]) / 2


def in_half(tensor: Tensor) -> Tensor:
    """Return numbers rounded to half precision, in their own dtype; as they are if it is too narrow for the largest."""
    half = torch.finfo(torch.float16)
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
        return tensor
    is_fitting = half.smallest_normal <= float(tensor.abs().amax()) <= half.max
    return tensor.to(torch.float16).to(tensor.dtype) if is_fitting else tensor


def again_sparse(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    """Return tuned tensors with zeros where there were zeros before: an optimizer may have moved some."""
    zeros = {name: torch.zeros_like(tensors[name]) for name in names}
    return {**tensors, **{name: torch.where(before[name] != 0, tensors[name], zero) for name, zero in zeros.items()}}


def again_shared(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    """Return tuned tensors in which weights that were equal before are equal again, at their mean in half precision.

    While training goes on, those of a cluster move together but for rounding.
    """
    found = again_sparse(tensors, before, names)
    for name in names:
        values, codes = torch.unique(before[name], return_inverse=True)
        flat, codes = found[name].double().reshape(-1), codes.reshape(-1)
        sums = torch.zeros(len(values), dtype=torch.float64).index_add_(0, codes, flat)
        means = sums / torch.bincount(codes, minlength=len(values))
        found[name] = in_half(means[codes].to(found[name].dtype)).reshape(found[name].shape)
    return found

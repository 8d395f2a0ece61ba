"""The costs of normalisation and pooling, by the shapes of what they get and return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from orchestray.trainers.analysis.cost import Cost, levels, total


def moments_of(values: int, groups: int) -> Cost:
    """Return the cost of means and variances: sums of values and of squares at the same time, then E x^2 - (E x)^2."""
    sums = total(values, groups).beside(Cost(multiplications=values, depth=1) + total(values, groups))
    return sums + Cost(multiplications=3 * groups, additions=groups, depth=3)


# -- normalisation -----------------------------------------------------------------------------------------------------


def _normalised(values: int, groups: int, *, is_affine: bool) -> Cost:
    """Return the cost of normalising groups by their own moments, and of a factor and an offset."""
    cost = moments_of(values, groups) + Cost(additions=groups, others=groups, depth=2)
    cost = cost + Cost(multiplications=values, additions=values, depth=2)
    return cost + Cost(multiplications=values, additions=values, depth=2) if is_affine else cost


def _normalised_backward(values: int, groups: int, parameters: int) -> Cost:
    """Return the cost of the gradients of `_normalised`: two sums of each group, two of each parameter."""
    sums = Cost(multiplications=values, depth=1) + total(values, groups).beside(total(values, groups))
    of_input = sums + Cost(multiplications=3 * values, additions=2 * values, depth=4)
    if not parameters:
        return of_input
    of_factor = Cost(multiplications=values, depth=1) + total(values, parameters)
    return of_input.beside(of_factor).beside(total(values, parameters))


def _batch_norm(x: Tensor, weight: Tensor | None, _bias: Any, *more: Any, **__: Any) -> Cost:
    is_training = next((one for one in more if isinstance(one, bool)), True)
    if not is_training:
        return Cost(multiplications=2 * x.numel(), additions=2 * x.numel(), depth=4)
    return _normalised(x.numel(), x.shape[1], is_affine=weight is not None)


def _batch_norm_backward(grad: Tensor, _x: Tensor, *_: Any, **__: Any) -> Cost:
    return _normalised_backward(grad.numel(), grad.shape[1], grad.shape[1])


def _layer_norm(x: Tensor, shape: Any, weight: Tensor | None, *_: Any, **__: Any) -> Cost:
    return _normalised(x.numel(), x.numel() // max(1, math.prod(shape)), is_affine=weight is not None)


def _layer_norm_backward(grad: Tensor, _x: Tensor, shape: Any, *_: Any, **__: Any) -> Cost:
    size = max(1, math.prod(shape))
    return _normalised_backward(grad.numel(), grad.numel() // size, size)


def _group_norm(x: Tensor, weight: Tensor | None, _bias: Any, samples: int, *more: Any, **__: Any) -> Cost:
    return _normalised(x.numel(), samples * more[2], is_affine=weight is not None)


def _group_norm_backward(grad: Tensor, *more: Any, **__: Any) -> Cost:
    return _normalised_backward(grad.numel(), more[4] * more[7], more[5])


# -- pooling -----------------------------------------------------------------------------------------------------------


def _max_pool(_x: Tensor, kernel: Any, *_: Any, out: Any, **__: Any) -> Cost:
    count = (out[0] if isinstance(out, tuple) else out).numel()
    return Cost(others=count * (math.prod(kernel) - 1), depth=sum(map(levels, kernel)))


def _average_pool(_x: Tensor, kernel: Any, *_: Any, out: Tensor, **__: Any) -> Cost:
    depth = sum(map(levels, kernel))
    return Cost(out.numel(), out.numel() * (math.prod(kernel) - 1), depth=depth + 1)


def _pool_backward(grad: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(additions=grad.numel(), depth=1)


def _average_pool_backward(grad: Tensor, _x: Tensor, kernel: Any, *_: Any, **__: Any) -> Cost:
    return Cost(grad.numel(), grad.numel() * math.prod(kernel), depth=2)


LAYERS: Mapping[Callable[..., Cost], tuple[str, ...]] = {
    _batch_norm: ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    _batch_norm_backward: ("native_batch_norm_backward", "batch_norm_backward"),
    _layer_norm: ("native_layer_norm",),
    _layer_norm_backward: ("native_layer_norm_backward",),
    _group_norm: ("native_group_norm",),
    _group_norm_backward: ("native_group_norm_backward",),
    _max_pool: ("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d"),
    _average_pool: ("avg_pool2d", "avg_pool3d"),
    _pool_backward: (
        *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    ),
    _average_pool_backward: ("avg_pool2d_backward", "avg_pool3d_backward"),
}
"""Maps formulas to the names of their operations."""

"""The costs of operations beside products, reductions and normalisation: interpolation, distances, odd activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from orchestray.trainers.analysis.cost import Cost, levels, total

ELEMENTWISE = frozenset(
    {
        *("hardtanh_backward", "elu_backward", "leaky_relu_backward", "softplus_backward", "hardswish"),
        *("hardswish_backward", "hardsigmoid_backward", "softshrink_backward", "hardshrink_backward"),
        *("rrelu_with_noise", "rrelu_with_noise_backward", "_prelu_kernel", "_prelu_kernel_backward"),
        *("log_sigmoid_forward", "log_sigmoid_backward", "glu_backward", "masked_fill_"),
    }
)
"""Operations on each element that torch does not mark as such."""


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _gated(_x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return Cost(multiplications=out.numel(), others=out.numel(), depth=2)


def _binary_cross_entropy(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    """Count (1 - y) x + log(1 + exp(-|x|)) + max(-x, 0) for each value, and their mean."""
    count = x.numel()
    values = Cost(multiplications=count, additions=4 * count, others=4 * count, depth=6)
    return values + total(count, out.numel()) + Cost(multiplications=out.numel(), depth=1)


def _largest(x: Tensor, *_: Any, out: Any, **__: Any) -> Cost:
    count = _first(out).numel()
    return Cost(others=max(0, x.numel() - count), depth=levels(-(-x.numel() // max(1, count))))


def _added_back(grad: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(additions=grad.numel(), depth=1)


def _interpolated(taps_a_dimension: int, dimensions: int) -> Callable[..., Cost]:
    taps = taps_a_dimension**dimensions

    def cost(_x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
        return Cost(taps * out.numel(), (taps - 1) * out.numel(), depth=1 + levels(taps))

    return cost


def _interpolated_backward(taps_a_dimension: int, dimensions: int) -> Callable[..., Cost]:
    taps = taps_a_dimension**dimensions

    def cost(grad: Tensor, *_: Any, **__: Any) -> Cost:
        return Cost(taps * grad.numel(), taps * grad.numel(), depth=2)

    return cost


def _folded(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return Cost(additions=x.numel(), depth=levels(-(-x.numel() // max(1, out.numel()))))


def _bags(weight: Tensor, indices: Tensor, *_: Any, out: Any, **__: Any) -> Cost:
    values, bags = indices.numel() * weight.shape[-1], _first(out).numel()
    return total(max(values, bags), max(1, bags))


def _bags_backward(grad: Tensor, indices: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(additions=indices.numel() * grad.shape[-1], depth=levels(indices.numel()))


def _distances(a: Tensor, _b: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    values = out.numel() * a.shape[-1]
    squares = Cost(multiplications=values, additions=values, depth=2)
    return squares + total(values, max(1, out.numel())) + Cost(others=out.numel(), depth=1)


def _distances_backward(grad: Tensor, a: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    values = grad.numel() * a.shape[-1]
    return Cost(2 * values, values, depth=3) + total(values, max(1, out.numel()))


def _weight_norm(v: Tensor, g: Tensor, *_: Any, **__: Any) -> Cost:
    squares = Cost(multiplications=v.numel(), depth=1) + total(v.numel(), g.numel())
    return squares + Cost(g.numel(), others=g.numel(), depth=2) + Cost(multiplications=v.numel(), depth=1)


def _weight_norm_backward(grad: Tensor, _v: Tensor, g: Tensor, *_: Any, **__: Any) -> Cost:
    products = Cost(multiplications=grad.numel(), depth=1) + total(grad.numel(), g.numel())
    return products + Cost(2 * grad.numel() + 3 * g.numel(), grad.numel(), depth=5)


_LINEAR = (("upsample_linear1d", 1), ("upsample_bilinear2d", 2), ("upsample_trilinear3d", 3), ("grid_sampler_2d", 2))
_KERNELS = (*((name, 2, dimensions) for name, dimensions in _LINEAR), ("upsample_bicubic2d", 4, 2))
RARER: Mapping[Callable[..., Cost], tuple[str, ...]] = {
    _gated: ("glu",),
    _binary_cross_entropy: ("binary_cross_entropy_with_logits",),
    _largest: ("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
    _added_back: (
        *(f"{pool}_max_pool{n}d_backward" for pool in ("adaptive", "fractional") for n in (2, 3)),
        *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        *(f"upsample_nearest{n}d_backward" for n in (1, 2, 3)),
    ),
    _folded: ("col2im",),
    _bags: ("_embedding_bag",),
    _bags_backward: ("_embedding_bag_backward",),
    _distances: ("_cdist_forward",),
    _distances_backward: ("_cdist_backward",),
    _weight_norm: ("_weight_norm_interface",),
    _weight_norm_backward: ("_weight_norm_interface_backward",),
    **{_interpolated(taps, dimensions): (name,) for name, taps, dimensions in _KERNELS},
    **{_interpolated_backward(taps, dimensions): (f"{name}_backward",) for name, taps, dimensions in _KERNELS},
}
"""Maps formulas to the names of their operations."""

"""The costs of torch's operations, by the shapes of what they get and return.

A formula counts what the definition of an operation needs; a kernel may do more, or less. An operation without a
formula is not counted, and named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from orchestray.trainers.analysis.cost import NOTHING, Cost, levels, product, total
from orchestray.trainers.analysis.layer_formulas import LAYERS, moments_of
from orchestray.trainers.analysis.rarer_formulas import RARER

Formula: TypeAlias = Callable[..., Cost]
"""Gets the operation's arguments and, by the name `out`, its result."""
_aten = torch.ops.aten


# -- products of matrices ----------------------------------------------------------------------------------------------


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Cost:
    return _of(a, product(a.shape[0], a.shape[1], b.shape[1]))


def _bmm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Cost:
    return _of(a, product(a.shape[1], a.shape[2], b.shape[2]) * a.shape[0])


def _of(tensor: Tensor, cost: Cost) -> Cost:
    """Return the real operations of these, which are complex if the tensor is."""
    if not tensor.is_complex():
        return cost
    products = cost.multiplications
    return Cost(4 * products, 2 * products + 2 * cost.additions, cost.others, cost.depth + bool(products))


def _plus(formula: Formula) -> Formula:
    """Return the formula of an operation that adds its first argument to what `formula` counts."""

    def added(_bias: Tensor, *factors: Any, out: Tensor, **__: Any) -> Cost:
        return formula(*factors, out=out) + _of(out, Cost(additions=out.numel(), depth=1))

    return added


def _mv(a: Tensor, _vector: Tensor, **_: Any) -> Cost:
    return _of(a, product(a.shape[0], a.shape[1], 1))


def _dot(a: Tensor, _b: Tensor, **_: Any) -> Cost:
    return _of(a, product(1, a.numel(), 1))


# -- convolution -------------------------------------------------------------------------------------------------------


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, out: Tensor, **_: Any) -> Cost:
    """Count the products of a convolution by its definition (survey, Tables 4 and 6: direct)."""
    transposed = settings[3]
    groups = settings[5]
    kernel = weight.shape[2:]
    products = (x if transposed else out).numel() * weight[0].numel()
    depth = levels(weight.shape[0] // groups if transposed else weight.shape[1]) + sum(map(levels, kernel))
    cost = Cost(products, products - out.numel(), depth=1 + depth)
    return cost if bias is None else cost + Cost(additions=out.numel(), depth=1)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, _bias_sizes: Any, *settings: Any, **_: Any) -> Cost:
    """Count the products of the gradients that are asked for; each product of the forward pass is in one of each."""
    transposed, groups = settings[3], settings[5]
    of_input, of_weight, of_bias = settings[6]
    products = (x if transposed else grad).numel() * weight[0].numel()
    channels = weight.shape[1] if transposed else weight.shape[0] // groups
    cost = NOTHING
    if of_input:
        depth = 1 + levels(channels) + sum(map(levels, weight.shape[2:]))
        cost = cost.beside(Cost(products, max(0, products - x.numel()), depth=depth))
    if of_weight:
        depth = 1 + levels(x.shape[0]) + sum(map(levels, (x if transposed else grad).shape[2:]))
        cost = cost.beside(Cost(products, max(0, products - weight.numel()), depth=depth))
    if of_bias:
        cost = cost.beside(total(grad.numel(), grad.shape[1]))
    return cost


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Cost:
    heads, rows, width = math.prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    scores = rows * key.shape[-2]
    one = product(rows, width, key.shape[-2]) + Cost(multiplications=scores, depth=1)
    one = one + _softmax_of(scores, rows) + product(rows, key.shape[-2], value.shape[-1])
    return one * heads


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Cost:
    """Count the four products of the gradients, and one more for the scores, which are computed again."""
    heads, rows, width = math.prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    columns, scores = key.shape[-2], rows * key.shape[-2]
    again = product(rows, width, columns) + _softmax_of(scores, rows)
    of_value = product(columns, rows, value.shape[-1])
    of_scores = product(rows, value.shape[-1], columns) + _softmax_backward_of(scores, rows)
    of_inputs = product(rows, columns, width).beside(product(columns, rows, width))
    return (again + of_value.beside(of_scores + of_inputs)) * heads


# -- element by element ------------------------------------------------------------------------------------------------

_ADDITIONS = frozenset({"add", "sub", "rsub", "sum"})
_MULTIPLICATIONS = frozenset({"mul", "div", "square", "reciprocal", "neg", "true_divide"})
_BOTH = frozenset({"addcmul", "addcdiv", "lerp", "mse_loss"})


def pointwise(name: str, out: Tensor) -> Cost:
    """Return the cost of an operation on each element.

    Args:
        name: its name, without namespace and overload.
        out: its result.
    """
    name, count = name.removesuffix("_"), out.numel()
    if name in _ADDITIONS:
        return _of(out, Cost(additions=count, depth=1))
    if name in _MULTIPLICATIONS:
        return _of(out, Cost(multiplications=count, depth=1))
    if name in _BOTH:
        return _of(out, Cost(multiplications=count, additions=count, depth=2))
    return Cost(others=count, depth=1)


def _loss(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return Cost(multiplications=x.numel(), additions=x.numel(), depth=2) + _mean_of(x.numel(), out.numel())


def _loss_backward(_grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(multiplications=2 * x.numel(), additions=x.numel(), depth=3)


# -- reductions --------------------------------------------------------------------------------------------------------


def _sum(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return _of(x, total(x.numel(), out.numel()))


def _mean_of(values: int, groups: int) -> Cost:
    return total(values, groups) + Cost(multiplications=groups, depth=1) if values > groups else NOTHING


def _mean(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return _mean_of(x.numel(), out.numel()) * (2 if x.is_complex() else 1)  # of both parts


def _extreme(x: Tensor, *_: Any, out: Any, **__: Any) -> Cost:
    groups = (out[0] if isinstance(out, tuple) else out).numel()
    return Cost(others=x.numel() - groups, depth=levels(x.numel() // max(1, groups)))


def _product(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return Cost(multiplications=x.numel() - out.numel(), depth=levels(x.numel() // max(1, out.numel())))


def _norm(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    values = x.numel() * (2 if x.is_complex() else 1)
    squares = Cost(multiplications=values, depth=1)
    return squares + total(values, out.numel()) + Cost(others=out.numel(), depth=1)


def _variance(x: Tensor, *_: Any, out: Any, **__: Any) -> Cost:
    return moments_of(x.numel(), (out[0] if isinstance(out, tuple) else out).numel())


def _scan(x: Tensor, dimension: int, *_: Any, **__: Any) -> Cost:
    """Count parallel prefix sums: two sweeps of a tree (Blelloch 1990)."""
    return _of(x, Cost(additions=2 * x.numel(), depth=2 * levels(x.shape[dimension] if x.ndim else 1)))


def _logsumexp(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Cost:
    return _softmax_of(x.numel(), out.numel())


# -- softmax -----------------------------------------------------------------------------------------------------------


def _softmax_of(values: int, rows: int) -> Cost:
    """Return the cost of softmax: the largest value, differences, exp, their sum, and a division of each."""
    largest = Cost(others=values - rows, depth=levels(values // max(1, rows)))
    powers = Cost(additions=values, others=values, depth=2)
    return largest + powers + total(values, rows) + Cost(multiplications=values, depth=1)


def _softmax(x: Tensor, dimension: int, *_: Any, **__: Any) -> Cost:
    return _softmax_of(x.numel(), x.numel() // max(1, x.shape[dimension] if x.ndim else 1))


def _log_softmax(x: Tensor, dimension: int, *_: Any, **__: Any) -> Cost:
    rows = x.numel() // max(1, x.shape[dimension] if x.ndim else 1)
    largest = Cost(others=x.numel() - rows, depth=levels(x.numel() // max(1, rows)))
    powers = Cost(additions=x.numel(), others=x.numel(), depth=2)
    return largest + powers + total(x.numel(), rows) + Cost(additions=x.numel(), others=rows, depth=2)


def _softmax_backward_of(values: int, rows: int) -> Cost:
    return (
        Cost(multiplications=values, depth=1)
        + total(values, rows)
        + Cost(multiplications=values, additions=values, depth=2)
    )


def _softmax_backward(grad: Tensor, _output: Tensor, dimension: int, *_: Any, **__: Any) -> Cost:
    return _softmax_backward_of(grad.numel(), grad.numel() // max(1, grad.shape[dimension] if grad.ndim else 1))


def _nll_loss(x: Tensor, *_: Any, **__: Any) -> Cost:
    return _mean_of(x.numel() // x.shape[1] if x.ndim > 1 else 1, 1)


def _nll_loss_backward(_grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(multiplications=x.numel() // x.shape[1] if x.ndim > 1 else 1, depth=1)


# -- sums at indices ---------------------------------------------------------------------------------------------------


def _embedding_backward(grad: Tensor, indices: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(additions=grad.numel(), depth=levels(indices.numel()))


def _scattered(_x: Tensor, *more: Any, **__: Any) -> Cost:
    values = next((one for one in reversed(more) if isinstance(one, Tensor)), None)
    return NOTHING if values is None else _of(values, Cost(additions=values.numel(), depth=levels(values.numel())))


def _dropout(x: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(multiplications=2 * x.numel(), others=2 * x.numel(), depth=4)


def _dropout_backward(grad: Tensor, *_: Any, **__: Any) -> Cost:
    return Cost(multiplications=2 * grad.numel(), depth=2)


# -- Fourier transforms ------------------------------------------------------------------------------------------------


def _fourier(x: Tensor, dimensions: Any, *_: Any, out: Tensor, **__: Any) -> Cost:
    """Count the butterflies of radix 2: a complex product and two sums each; half of them where one side is real."""
    whole = x if not x.is_complex() or out.is_complex() else out
    cost = NOTHING
    for dimension in dimensions:
        size = whole.shape[dimension]
        points = whole.numel() * levels(size)
        cost = cost + Cost(2 * points, 3 * points, depth=3 * levels(size))
    if x.is_complex() and out.is_complex():
        return cost
    return Cost(cost.multiplications // 2, cost.additions // 2, depth=cost.depth)


_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_BY_NAME: Mapping[Formula, tuple[str, ...]] = {
    _mm: ("mm", "_int_mm"),
    _bmm: ("bmm",),
    _plus(_mm): ("addmm",),
    _plus(_bmm): ("baddbmm",),
    _mv: ("mv",),
    _plus(_mv): ("addmv",),
    _dot: ("dot", "vdot"),
    _convolution: ("convolution", "_convolution", "convolution_overrideable"),
    _convolution_backward: ("convolution_backward", "convolution_backward_overrideable"),
    _attention: (*(f"_scaled_dot_product_{one}" for one in _ATTENTIONS), "_scaled_dot_product_attention_math"),
    _attention_backward: tuple(f"_scaled_dot_product_{one}_backward" for one in _ATTENTIONS),
    _loss: ("mse_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
    _loss_backward: tuple(
        f"{one}_backward" for one in ("mse_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss")
    ),
    _sum: ("sum", "nansum", "trace"),
    _mean: ("mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    _extreme: ("amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "aminmax", "count_nonzero"),
    _product: ("prod",),
    _norm: ("linalg_vector_norm", "norm"),
    _variance: ("var", "std", "var_mean", "std_mean"),
    _scan: ("cumsum", "cumprod"),
    _logsumexp: ("logsumexp",),
    _softmax: ("_softmax", "_safe_softmax"),
    _log_softmax: ("_log_softmax",),
    _softmax_backward: ("_softmax_backward_data", "_log_softmax_backward_data"),
    _nll_loss: ("nll_loss_forward", "nll_loss2d_forward"),
    _nll_loss_backward: ("nll_loss_backward", "nll_loss2d_backward"),
    _embedding_backward: ("embedding_dense_backward",),
    _scattered: (
        *("scatter_add", "scatter_add_", "index_add", "index_add_"),
        *("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
    ),
    _fourier: ("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    _dropout: ("native_dropout",),
    _dropout_backward: ("native_dropout_backward",),
}
FORMULAS: Mapping[Any, Formula] = {
    getattr(_aten, name): formula
    for formula, names in (*_BY_NAME.items(), *LAYERS.items(), *RARER.items())
    for name in names
    if hasattr(_aten, name)
}
"""Maps operations (torch's `OpOverloadPacket`) to their formulas."""

_MOVES = (
    *("clone", "copy_", "copy", "_to_copy", "cat", "stack", "index", "index_select", "gather", "embedding", "scatter"),
    *("constant_pad_nd", "arange", "flip", "roll", "repeat", "tril", "triu", "slice_backward", "select_backward"),
    *("unfold_backward", "im2col", "lift_fresh", "lift_fresh_copy", "detach", "masked_select", "slice_scatter"),
    *("select_scatter", "fill", "fill_", "zero", "zero_", "reflection_pad2d", "replication_pad2d", "eye", "linspace"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "masked_scatter", "diagonal_backward", "one_hot"),
    *("_conj_physical", "view_as_real", "view_as_complex", "resize_", "_unsafe_index", "bucketize", "searchsorted"),
    *("_reshape_copy", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "median", "kthvalue"),
    *("diag_embed", "cummax", "cummin", "replication_pad1d", "reflection_pad1d", "reflection_pad3d"),
    *("_local_scalar_dense", "sort", "topk", "nonzero", "scalar_tensor", "split_with_sizes_copy", "scatter_", "set_"),
)
_MAKERS = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full")
MOVES = frozenset(getattr(_aten, name) for name in _MOVES if hasattr(_aten, name))
"""Operations that move values and compute nothing. Sorting, and what finds the largest of all so far, is among them:
comparisons are not counted there.
"""
MAKERS = frozenset(
    getattr(_aten, name)
    for name in (*_MAKERS, *(f"{one}_like" for one in _MAKERS), "empty_strided", "new_empty_strided")
    if hasattr(_aten, name)
)
"""Operations that make values of nothing: of what they get, they look at shapes alone."""

RANDOM = frozenset(
    getattr(_aten, name) for name in ("bernoulli", "bernoulli_", "rand", "randn", "uniform_", "normal_", "exponential_")
)
"""Operations that draw a number for each element."""

PRODUCTS = frozenset(
    name
    for formula in (_mm, _bmm, _mv, _dot, _convolution, _convolution_backward, _attention, _attention_backward)
    for name in _BY_NAME[formula]
) | {"addmm", "baddbmm", "addmv"}
"""Names of the operations that are products of matrices or vectors, or convolutions."""
TRANSFORMS = frozenset(_BY_NAME[_fourier])
"""Names of the Fourier transforms."""

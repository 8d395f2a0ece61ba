"""Kronecker factors of a layer's Fisher matrix: gathering them, damping them, inverting them.

J. Martens, R. Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature" (ICML 2015), and
R. Grosse, J. Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers" (ICML 2016). The Fisher
matrix is the empirical one: the errors are those of the targets of the batch, as in Osawa et al. (CVPR 2019).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.trainers.layout.tensor_slice import TensorSlice


class FactoredLayer:
    """A fully connected or convolutional layer: the products of its inputs and of its errors, added up.

    The gradient of its weight and bias is a matrix `[out, in]`, in which `in` counts the bias as an input of 1.
    """

    def __init__(self, weight_name: str, bias_name: str | None, weight: Tensor) -> None:
        self.weight_name = weight_name
        """Name of the weight, by which the state of the layer is saved."""
        self.bias_name = bias_name
        self.num_outputs = weight.shape[0]
        self.num_inputs = weight[0].numel() + (bias_name is not None)
        self.is_watched = False
        """True while forward and backward passes count."""
        self._shape = tuple(weight.shape)
        self._group: Collective = SoloCollective()
        """Workers that the layer is split over, or that compute it together."""
        self._counts = True
        """True if, of that group, this worker counts the rows that all of it have."""
        self._splits_rows = False
        self._columns = (torch.empty(0), torch.empty(0))
        """Features of inputs and of errors that this worker has where they are split."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._like = torch.zeros(0, dtype=dtype, device=weight.device)

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [self.weight_name] if self.bias_name is None else [self.weight_name, self.bias_name]

    @property
    def cost(self) -> int:
        """Cost of inverting both factors, in multiplications up to a constant."""
        return self.num_inputs**3 + self.num_outputs**3

    def zeros(self, size: int) -> Tensor:
        """Return a matrix of zeros, `[size, size]`, of the type of the factors."""
        return self._like.new_zeros(size, size)

    def clear(self) -> None:
        """Begin the sums."""
        self.inputs = self.zeros(self.num_inputs)
        """Sum of a a^T over the rows; a row is a sample of a layer, a token, or the patch under a position."""
        self.errors = self.zeros(self.num_outputs)
        """Sum of e e^T over the rows, where e is the gradient of the batch's loss by the layer's output."""
        self.num_rows = self._like.new_zeros(1)

    def divide(self, piece: TensorSlice | None, group: Collective, index: int, *, splits_rows: bool) -> None:
        """Note which part of the layer this worker computes.

        Args:
            piece: its part of the weight; None: all.
            group: workers that the layers are split over.
            index: number of the layer; what all have is counted by the workers in turn.
            splits_rows: True if each has other rows, where it has all features.
        """
        self._group, self._counts, self._splits_rows = group, index % group.size == group.rank, splits_rows
        if piece is None or group.size == 1 or not piece.numel:
            return
        outputs, inputs = piece.ranges[0], piece.ranges[1]
        if inputs == ((0, self._shape[1]),):  # a convolution may take the channels that the one before it leaves here
            inputs = (split_evenly(self._shape[1], group.size)[group.rank],)
        area = math.prod(self._shape[2:])
        self._columns = (
            torch.cat([torch.arange(start * area, stop * area) for start, stop in inputs]),
            torch.cat([torch.arange(start, stop) for start, stop in outputs]),
        )

    def watch(self, module: nn.Module) -> RemovableHandle:
        """Have the passes through the module that computes the layer add to the sums, until the handle is removed."""
        cast(Any, module).is_counted = True  # False in a pass that counts nowhere, see `batch_norm.not_counted`
        if (hooks := getattr(module, "row_hooks", None)) is None:
            return module.register_forward_hook(self._after_forward, with_kwargs=True)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = partial(self._after_rows, module)
        return handle

    def _after_forward(self, module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Tensor) -> None:
        given = arguments[0] if arguments else named["input"]
        self._after_rows(module, getattr(module, "own_input", _same)(given), None, output)

    def _after_rows(self, module: Any, given: Tensor, padding: Sequence[int] | None, output: Tensor) -> None:
        """Have the backward pass add some rows.

        Args:
            module: module that computed them.
            given: their inputs.
            padding: padding of these inputs; None: the module's.
            output: their outputs.
        """
        if self.is_watched and module.is_counted and torch.is_grad_enabled() and output.requires_grad:
            add = partial(self._add, module, [given.detach()], padding)
            output.register_hook(add)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(
        self, module: nn.Linear | nn.Conv2d, inputs: list[Tensor], padding: Sequence[int] | None, error: Tensor
    ) -> None:
        if not inputs:  # a backward pass in two halves comes by twice, with the same error
            return
        if padding is None:
            error = getattr(module, "own_output", _same)(error)
        if isinstance(module, nn.Conv2d):
            error = error.movedim(-3, -1)
        sizes = (self.num_inputs - (self.bias_name is not None), self.num_outputs)
        given = (_rows(module, inputs.pop(), padding), error.reshape(-1, error.shape[-1]))
        (rows, is_counted), (errors, are_counted) = (
            self._whole(*side) for side in zip(given, sizes, self._columns, strict=True)
        )
        if is_counted:
            if self.bias_name is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            self.inputs.addmm_(rows.T, rows)
            self.num_rows += len(rows)
        if are_counted:
            self.errors.addmm_(errors.T, errors)

    def _whole(self, rows: Tensor, size: int, columns: Tensor) -> tuple[Tensor, bool]:
        """Return rows with the features of all workers, `[rows, size]`, and True if this worker counts them."""
        rows = rows.to(self._like.dtype)
        if rows.shape[1] == size:
            return rows, self._counts or self._splits_rows
        whole = rows.new_zeros(len(rows), size)
        whole[:, columns] = rows
        self._group.all_reduce(whole)
        return whole, self._counts

    def join(self, of_weight: Tensor, of_bias: Tensor | None) -> Tensor:
        """Return the gradients of weight and bias as one matrix, `[out, in]`."""
        matrix = of_weight.reshape(self.num_outputs, -1).to(self._like.dtype)
        return matrix if of_bias is None else torch.cat([matrix, of_bias.to(self._like.dtype)[:, None]], dim=1)

    def split(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the parts of such a matrix that belong to weight and bias, in their shapes and types."""
        whole = matrix if bias is None else matrix[:, :-1]
        of_weight = whole.reshape(weight.shape).to(weight.dtype)
        return of_weight, None if bias is None else matrix[:, -1].to(bias.dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rows(module: nn.Linear | nn.Conv2d, inputs: Tensor, given_padding: Sequence[int] | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return inputs.reshape(-1, inputs.shape[-1])
    images = inputs.reshape(-1, *inputs.shape[-3:])
    padding = module.padding if given_padding is None else tuple(given_padding)
    if isinstance(padding, str):
        sides = [0, 0, 0, 0]
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        images, padding = functional.pad(images, sides), (0, 0)
    patches = functional.unfold(images, module.kernel_size, module.dilation, padding, module.stride)
    return patches.mT.reshape(-1, patches.shape[1])


def factored_layers(model: nn.Module) -> list[FactoredLayer]:
    """Return the layers that have Kronecker factors, in the model's order.

    Excluded are grouped convolutions, paddings other than zeros, subclasses, and weights that several modules share.

    Args:
        model: the plain model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values() if own is not None)
    layers = []
    for module in model.modules():
        if type(module) is nn.Conv2d:
            if module.groups > 1 or module.padding_mode != "zeros":
                continue
        elif type(module) is not nn.Linear:
            continue
        own = [module.weight] if module.bias is None else [module.weight, module.bias]
        if all(id(parameter) in names and uses[id(parameter)] == 1 for parameter in own):
            bias = names[id(module.bias)] if module.bias is not None else None
            layers.append(FactoredLayer(names[id(module.weight)], bias, module.weight))
    return layers


def damped_inverses(inputs: Tensor, errors: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the inverses of (A + pi sqrt(damping) I) and (G + sqrt(damping) / pi I).

    The damping is spread over the factors by their sizes: pi^2 is the ratio of tr A / dim A to tr G / dim G (Martens
    and Grosse 2015, section 6.3).

    Args:
        inputs: A, `[in, in]`.
        errors: G, `[out, out]`.
        damping: damping of the Kronecker product.

    Raises:
        TrainingError: a factor is not positive definite, as when a value is not finite.
    """
    of_inputs, of_errors = (float(factor.trace()) / len(factor) for factor in (inputs, errors))
    pi = math.sqrt(of_inputs / of_errors) if of_inputs > 0.0 and of_errors > 0.0 else 1.0
    root = math.sqrt(damping)
    return _inverse(inputs, pi * root), _inverse(errors, root / pi)


def _inverse(factor: Tensor, damping: float) -> Tensor:
    damped = factor + damping * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise TrainingError(
            "K-FAC cannot invert a factor of the curvature: it is not positive definite, or has values that are not "
            "finite. Use a larger train.optimizer.damping or a smaller train.optimizer.lr."
        )
    return torch.cholesky_inverse(lower).contiguous()  # by rows, as others receive it: products round by the layout

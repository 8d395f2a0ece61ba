"""The Kronecker factors of a layer's curvature: their statistics, their damped inverses, and steps by them.

J. Martens, R. Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature" (ICML 2015), and
R. Grosse, J. Martens, "A Kronecker-factored Approximate Fisher Matrix for Convolution Layers" (ICML 2016).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Factors = tuple[Tensor, Tensor]
"""The factor of a layer's inputs and that of the gradients of its outputs, or the inverses of the two."""

_NUM_COUNTS = 2


class LayerSums:
    """Sums of the products from which a layer's factors are made, taken while the layer is trained.

    They are taken in the backward pass, once for each use of the layer, whatever is evaluated or recomputed besides.
    """

    def __init__(self, layer: nn.Module, *, has_bias: bool) -> None:
        """
        Args:
            layer: a linear layer or a convolution, for which `is_factored` is true.
            has_bias: the bias is trained, and the inputs have a column of ones for it.
        """
        weight: Tensor = layer.weight  # type: ignore[assignment]
        self._layer, self._has_bias = layer, has_bias
        self.is_wanted = False
        """True in steps whose statistics count."""
        self.sizes = weight[0].numel() + has_bias, weight.shape[0]
        """Numbers of rows of the two factors."""
        self._like = torch.promote_types(weight.dtype, torch.float32), weight.device
        self._sums: Tensor | None = None
        self._handle = layer.register_forward_hook(self._after_forward, with_kwargs=True)

    @property
    def numel(self) -> int:
        """Number of elements of `take`."""
        return sum(size * size for size in self.sizes) + _NUM_COUNTS

    def take(self) -> Tensor:
        """Return the sums since the last call, flat: of the inputs, of the gradients, of samples and of rows."""
        taken, self._sums = self._sums, None
        if taken is None:
            dtype, device = self._like
            taken = torch.zeros(self.numel, dtype=dtype, device=device)
        return taken

    def close(self) -> None:
        """Stop watching the layer."""
        self._handle.remove()

    def _after_forward(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad and self.is_wanted:
            given = (args[0] if args else kwargs["input"]).detach()
            output.register_hook(lambda grad: self._add(given, grad.detach()))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, given: Tensor, grad: Tensor) -> None:
        inputs, outputs, num_samples = rows_of(self._layer, given.to(self._like[0]), grad.to(self._like[0]))
        if self._has_bias:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        counts = inputs.new_tensor([num_samples, len(inputs)])
        sums = torch.cat([(inputs.T @ inputs).view(-1), (outputs.T @ outputs).view(-1), counts])
        self._sums = sums if self._sums is None else self._sums.add_(sums)


def is_factored(layer: nn.Module) -> bool:
    """Return True for a layer that computes as torch's `Linear` or as an ungrouped `Conv2d` padded with zeros."""
    forward = type(layer).forward
    if forward is nn.Linear.forward:
        is_known = True
    elif forward is nn.Conv2d.forward:
        convolution: Any = layer
        is_known = convolution.groups == 1 and convolution.padding_mode == "zeros"
        is_known = is_known and not isinstance(convolution.padding, str)
    else:
        return False
    weight: Any = layer.weight
    return is_known and isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_floating_point()


def rows_of(layer: nn.Module, given: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return what a layer multiplied with its weights, and the gradients of the products.

    Args:
        layer: layer.
        given: its input: `[..., in]` of a linear layer, `[N, in, H, W]` or `[in, H, W]` of a convolution.
        grad: gradient of its output.

    Returns:
        Inputs `[rows, in]`, or `[rows, in x kernel]`; gradients `[rows, out]`; number of samples. A convolution has a
        row for each sample and place, and each row of a linear layer is a sample.
    """
    if not isinstance(layer, nn.Conv2d):
        rows = given.reshape(-1, given.shape[-1])
        return rows, grad.reshape(-1, grad.shape[-1]), len(rows)
    if given.dim() == 3:
        given, grad = given.unsqueeze(0), grad.unsqueeze(0)
    patches = functional.unfold(
        given,
        layer.kernel_size,
        dilation=layer.dilation,
        padding=layer.padding,  # type: ignore[arg-type]
        stride=layer.stride,
    )
    inputs = patches.transpose(1, 2).reshape(-1, patches.shape[1])
    return inputs, grad.flatten(2).transpose(1, 2).reshape(len(inputs), -1), len(given)


def factors_of(sums: Tensor, sizes: tuple[int, int]) -> Factors | None:
    """Return the factors of a batch.

    The gradients are those of the batch's mean loss, so the gradient of one of the N samples is N times as large. A
    convolution's input factor adds up the places of a sample, and its other factor is their mean (Grosse and Martens,
    theorem 1).

    Args:
        sums: `LayerSums.take`, added up over all that share the batch.
        sizes: numbers of rows of the two factors.

    Returns:
        The two factors; None if nobody used the layer.
    """
    inputs, outputs, counts = torch.split(sums, [sizes[0] ** 2, sizes[1] ** 2, _NUM_COUNTS])
    num_samples, num_rows = counts.tolist()
    if num_rows == 0:
        return None
    scale = num_samples**2 / num_rows
    return inputs.view(sizes[0], -1) / num_samples, outputs.view(sizes[1], -1) * scale


def damped_inverses(factors: Factors, damping: float) -> Factors:
    """Return the inverses of both factors with their part of the damping on the diagonal.

    The parts are pi sqrt(damping) and sqrt(damping) / pi; pi^2 is the ratio of the factors' mean eigenvalues (Martens
    and Grosse, section 6.3). The inverses are computed in float64.

    Raises:
        torch.linalg.LinAlgError: a factor is not finite.
    """
    means = [float(factor.double().trace()) / len(factor) for factor in factors]
    pi = math.sqrt(means[0] / means[1]) if min(means) > 0 else 1.0
    root = math.sqrt(damping)
    return _inverse(factors[0], pi * root), _inverse(factors[1], root / pi)


def _inverse(factor: Tensor, shift: float) -> Tensor:
    damped = factor.double()
    damped = damped + shift * torch.eye(len(damped), dtype=damped.dtype, device=damped.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped)).to(factor.dtype)


def stepped(weight: Tensor, bias: Tensor | None, inverses: Factors) -> Tensor:
    """Return the gradient of a layer's weight and bias, multiplied by the inverse of its curvature.

    Args:
        weight: gradient of the weight, `[out, ...]`.
        bias: gradient of the bias, `[out]`; None if it has none.
        inverses: result of `damped_inverses`.

    Returns:
        `[out, in]`, the bias as the last column.
    """
    matrix = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias.unsqueeze(1)], dim=1)
    of_inputs, of_outputs = inverses
    return of_outputs @ matrix.to(of_outputs.dtype) @ of_inputs

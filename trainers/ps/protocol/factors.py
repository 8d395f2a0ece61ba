"""Gradients of fully connected layers as the factors that make them up, which a server multiplies.

The gradient of a layer y = x W^T + b is E^T X. The inputs X, `[N, in]`, and the errors E, `[N, out]`, are N (in + out)
values instead of in * out. Workers send these, and gradients of
convolutions: the two protocols of Project Adam (Chilimbi et al., OSDI 2014, section 3.3.1).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.trainers.ps.protocol.partition import trainable
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient
from orchestray.trainers.ps.protocol.settings import Factors
from orchestray.trainers.sync.allreduce.captured_linear import FullyConnected, fully_connected_layers


@dataclass(frozen=True)
class FactoredGradient:
    """A flat gradient of which the parts of some layers are given by factors, and all others by runs of elements."""

    layers: Tensor
    """Row of each layer: N, in, out, and the first element of the weight; int64, `[layers, 4]`."""
    factors: Tensor
    """Inputs `[N, in]`, then errors `[N, out]`, of each layer: flat."""
    rest: RowSparseGradient
    """Elements of all other parameters, biases included."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of a message; `of_tensors` makes the same gradient of them."""
        return [self.layers, self.factors, *self.rest.tensors]

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> FactoredGradient:
        """Return the gradient whose `tensors` these are."""
        layers, factors, *rest = tensors
        return cls(layers, factors, RowSparseGradient(*rest))

    @property
    def num_bytes(self) -> int:
        return self.layers.nbytes + self.factors.nbytes + self.rest.num_bytes

    def cut(self, first: int, last: int) -> FactoredGradient:
        """Return the elements from `first` up to `last`, counted from `first`.

        Of a layer that is cut the errors of those outputs are left that have an element there.
        """
        rows, factors = list[list[int]](), [self.factors[:0]]
        for (num_rows, num_in, num_out, weight), inputs, errors in self._each():
            begin, end = max(0, (first - weight) // num_in), min(num_out, -((weight - last) // num_in))
            if begin < end:
                rows.append([num_rows, num_in, end - begin, weight + begin * num_in - first])
                factors += [inputs.reshape(-1), errors[:, begin:end].reshape(-1)]
        return FactoredGradient(_table(rows), torch.cat(factors), self.rest.cut(first, last))

    @torch.no_grad()
    def fill(self, into: Tensor) -> Tensor:
        """Write the flat gradient to `into`, with the product of each layer's factors, and return it."""
        self.rest.fill(into)
        for (*_, weight), inputs, errors in self._each():
            product = (errors.T @ inputs).view(-1)
            first, last = max(0, weight), min(into.numel(), weight + product.numel())
            into[first:last] = product[first - weight : last - weight]
        return into

    def _each(self) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield the row, the inputs and the errors of each layer."""
        begin = 0
        for row in self.layers.tolist():
            num_rows, num_in, num_out, _ = row
            end = begin + num_rows * num_in
            errors = self.factors[end : end + num_rows * num_out].view(num_rows, num_out)
            yield row, self.factors[begin:end].view(num_rows, num_in), errors
            begin = end + num_rows * num_out


def _table(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


class FactorCapture:
    """The fully connected layers of a worker's model, whose inputs and errors are captured while it computes.

    A layer sends factors if they are fewer values than its gradient, and if they produced it when this was first
    checked: one that is used in another way than by being called sends gradients like every other parameter.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], *, always: bool = False) -> None:
        """
        Args:
            model: model of the worker.
            parameters: parameters that the flat gradient is of, in its order.
            always: True to send factors even if they are more values than the gradient.
        """
        self._always = always
        self._sizes = [parameter.numel() for parameter in parameters]
        self._starts = [0, *accumulate(self._sizes)][:-1]
        self._layers = fully_connected_layers(model, parameters)
        modules = dict(model.named_modules())
        own, known = {id(parameter) for parameter in parameters}, {layer.name for layer in self._layers}
        self._others = [
            name
            for name, module in modules.items()
            if name not in known and own & {id(each) for each in module._parameters.values()}
        ]
        """Names of the modules that always send gradients."""
        self._handles = [layer.watch(modules[layer.name]) for layer in self._layers]

    def begin(self) -> None:
        """Forget what was captured, before the next share."""
        for layer in self._layers:
            layer.clear()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def gradient(self, gradients: Sequence[Tensor]) -> FactoredGradient | None:
        """Return the gradient of the share just computed; None if no layer sends factors.

        Args:
            gradients: flat gradient of each parameter.
        """
        chosen = [layer for layer in self._layers if self._sends_factors(layer, gradients)]
        if not chosen:
            return None
        rows = [[layer.num_rows, layer.in_features, layer.out_features, self._starts[layer.weight]] for layer in chosen]
        done = {layer.weight for layer in chosen}
        others = [index for index, size in enumerate(self._sizes) if size and index not in done]
        rest = RowSparseGradient(
            torch.tensor([self._starts[index] for index in others], dtype=torch.int64),
            torch.tensor([self._sizes[index] for index in others], dtype=torch.int64),
            torch.cat([gradients[0][:0], *(gradients[index] for index in others)]),
        )
        return FactoredGradient(_table(rows), flatten([layer.factors(gradients[0].device) for layer in chosen]), rest)

    def _sends_factors(self, layer: FullyConnected, gradients: Sequence[Tensor]) -> bool:
        if layer.inputs and not layer.is_checked:
            weight = gradients[layer.weight].view(layer.out_features, layer.in_features)
            layer.is_refused |= not layer.is_its_gradient(weight, None if layer.bias is None else gradients[layer.bias])
            layer.is_checked = True
        is_less = layer.num_rows * (layer.in_features + layer.out_features) < layer.in_features * layer.out_features
        has_elements = bool(layer.inputs) and self._sizes[layer.weight] > 0
        sends = has_elements and not layer.is_refused and (self._always or is_less)
        layer.way = "factors" if sends else "gradient"
        return sends

    def ways(self) -> dict[str, str]:
        """Return what each fully connected layer sent last: `factors` or `gradient`."""
        return {layer.name: layer.way for layer in self._layers}

    def run_report(self) -> dict[str, str]:
        """Return what each module with parameters sent last: `factors` or `gradient`."""
        return {**dict.fromkeys(self._others, "gradient"), **self.ways()}


def capture_of(model: nn.Module, factors: Factors, names: Container[str] | None = None) -> FactorCapture | None:
    """Return the capture of a worker's layers; None if it sends no factors.

    Args:
        model: model of the worker.
        factors: the key `strategy.exchange.factors`.
        names: names of the parameters that servers hold for this worker; default: all.
    """
    if factors == "never":
        return None
    return FactorCapture(model, [each for _, each in trainable(model, names)], always=factors == "always")

"""Fully connected layers send what their gradient is made of, where that is less than the gradient.

The gradient of a layer y = x W^T + b is E^T X, with a row of the inputs X, `[N, in]`, and of the errors E, `[N, out]`,
for every sample: N (in + out) values in place of in * out. Project Adam (Chilimbi et al., OSDI 2014, section 3.3.1)
sends them to the parameter server, which multiplies; sufficient factor broadcasting (Xie et al., "Distributed Machine
Learning via Sufficient Factor Broadcasting", 2015) sends them to all workers, who each recompose the sum. Poseidon
(Zhang et al., USENIX ATC 2017, section 3.2, algorithm 1) chooses for each layer by the bytes; so does `Factored`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orchestray.trainers.compression.base import as_bytes, from_bytes
from orchestray.trainers.exchange.fully_connected import FullyConnected, fully_connected_layers
from orchestray.trainers.exchange.lockstep import LockStep, flatten, unflatten
from orchestray.trainers.exchange.messages import trade


def factors_to_server(num_rows: int, in_features: int, out_features: int, num_workers: int) -> int:
    """Values that m workers send to a parameter server as factors: m N (out + in) (Project Adam)."""
    return num_workers * num_rows * (out_features + in_features)


def gradients_to_server(in_features: int, out_features: int, num_workers: int) -> int:
    """Values that m workers send to a parameter server as gradients: m out in."""
    return num_workers * out_features * in_features


def factors_to_all(num_rows: int, in_features: int, out_features: int, num_workers: int) -> int:
    """Values that all P workers send when each broadcasts its factors: P (P-1) N (out + in), of N rows each."""
    return num_workers * (num_workers - 1) * num_rows * (out_features + in_features)


def gradients_to_all(in_features: int, out_features: int, num_workers: int) -> int:
    """Values that all P workers send in a bandwidth-optimal all-reduce: 2 (P-1) out in."""
    return 2 * (num_workers - 1) * out_features * in_features


class Factored(LockStep):
    """An all-reduce whose fully connected layers may send inputs and errors; the same sum.

    A layer takes part if it is an `nn.Linear` that is called (not one whose weight is used by itself, tied to another
    or split over workers): in the first step with samples its factors are held against its gradient, and where they do
    not make it, it sends gradients like every other parameter.

    Args:
        always: send factors also where they are more than the gradient.
    """

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self._always = always
        self.num_recomposed = 0
        """Products of other replicas' factors in the last step: P - 1 for each layer that sends factors."""
        self._layers: list[FullyConnected] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def prepare(self, model: nn.Module) -> None:
        self._layers = fully_connected_layers(model, self._parameters)
        modules = dict(model.named_modules())
        self._handles = [modules[layer.name].register_forward_hook(layer.hook) for layer in self._layers]

    def num_flags(self, model: nn.Module) -> int:
        return len(fully_connected_layers(model, self._parameters))

    def detach(self) -> None:
        super().detach()
        for handle in self._handles:
            handle.remove()
        self._layers, self._handles = [], []

    def before_step(self, step: int) -> None:
        super().before_step(step)
        for layer in self._layers:
            layer.clear()

    def flags(self) -> list[bool]:
        """Of each layer whether its factors do not make its gradient here."""
        refused = []
        for layer in self._layers:
            gradient = self._parameters[layer.weight].grad
            bias = None if layer.bias is None else self._parameters[layer.bias].grad
            if layer.is_refused or (layer.is_checked and (gradient is None) == (not layer.inputs)):
                refused.append(layer.is_refused)
                continue
            refused.append(not layer.is_its_gradient(gradient, bias))
            layer.is_checked = gradient is not None
        return refused

    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        for layer, refused in zip(self._layers, flags, strict=True):
            layer.is_refused = layer.is_refused or refused
        combined = list(gradients)
        recomposed = self._recompose(combined)
        rest = [index for index in range(len(gradients)) if index not in recomposed]
        for dtype in dict.fromkeys(gradients[index].dtype for index in rest):
            chosen = [index for index in rest if gradients[index].dtype == dtype]
            same = [gradients[index] for index in chosen]
            flat = flatten(same)
            self.joined().all_reduce(flat)
            for index, total in zip(chosen, unflatten(flat, same), strict=True):
                combined[index] = total
        for layer in self._layers:
            layer.clear()
        return combined

    def _recompose(self, combined: list[Tensor]) -> set[int]:
        """Fill in the sums that factors make; returns which."""
        if not self._layers:
            return set()
        own = torch.tensor([layer.num_rows for layer in self._layers])
        rows = self.joined().all_gather(own)
        chosen = [number for number in range(len(self._layers)) if self._chooses(number, int(rows[:, number].sum()))]
        self.num_recomposed = (self.joined().size - 1) * len(chosen)
        done: set[int] = set()
        for dtype in dict.fromkeys(self._layers[number].dtype for number in chosen):
            same = [number for number in chosen if self._layers[number].dtype == dtype]
            for number, factors in zip(same, self._everybodys(same, rows[:, same].tolist(), dtype), strict=True):
                layer = self._layers[number]
                inputs, errors = (torch.cat(parts) for parts in zip(*factors, strict=True))
                combined[layer.weight] = errors.T @ inputs
                done.add(layer.weight)
                if layer.bias is not None:
                    combined[layer.bias] = errors.sum(0)
                    done.add(layer.bias)
        return done

    def _chooses(self, number: int, rows_of_all: int) -> bool:
        layer, size = self._layers[number], self.joined().size
        factors = (size - 1) * rows_of_all * (layer.in_features + layer.out_features)
        is_less = factors < gradients_to_all(layer.in_features, layer.out_features, size)
        chosen = not layer.is_refused and (self._always or is_less)
        layer.way = "factors" if chosen else "gradient"
        return chosen

    def _everybodys(
        self, numbers: Sequence[int], rows: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Of each layer every rank's inputs and errors, in rank order.

        Args:
            numbers: of the layers.
            rows: of each rank how many rows it has of each layer.
            dtype: of the factors.
        """
        layers = [self._layers[number] for number in numbers]
        mine = as_bytes(torch.cat([torch.empty(0, dtype=dtype), *(layer.factors() for layer in layers)]))
        widths = [(layer.in_features, layer.out_features) for layer in layers]
        lengths = [[n * width for n, both in zip(of_rank, widths, strict=True) for width in both] for of_rank in rows]
        messages = trade([mine] * len(rows), [sum(length) * dtype.itemsize for length in lengths], self.joined())
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        for length, message in zip(lengths, messages, strict=True):
            parts = iter(torch.split(from_bytes(message, dtype), length))
            for place, (num_in, num_out) in enumerate(widths):
                found[place].append((next(parts).view(-1, num_in), next(parts).view(-1, num_out)))
        return found

    def told(self) -> dict[str, str]:
        """Of each fully connected layer what it sent in the last step: `factors` or `gradient`."""
        return {layer.name: layer.way for layer in self._layers}

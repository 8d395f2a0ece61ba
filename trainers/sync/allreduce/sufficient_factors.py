"""Fully connected layers that send the factors of their gradient, if those are smaller than the gradient.

The gradient of a layer y = x W^T + b is E^T X. The inputs X, `[N, in]`, and errors E, `[N, out]`, have a row for every
sample: N (in + out) values instead of in * out. Project Adam (Chilimbi et al., OSDI 2014, section 3.3.1) sends them to
the parameter server, which multiplies. Sufficient factor broadcasting (Xie et al., "Distributed Machine Learning via
Sufficient Factor Broadcasting", 2015) sends them to all workers, which each recompose the sum. Poseidon (Zhang et al.,
USENIX ATC 2017, section 3.2, algorithm 1) chooses for each layer by the bytes: between factors for all, and a store of
which nodes host shards. `Factored` does so with `store_shards`; without, between factors for all and an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.trainers.compression.base import as_bytes, from_bytes
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.allreduce.captured_linear import FullyConnected, fully_connected_layers
from orchestray.trainers.sync.allreduce.colocated_store import ColocatedStore, factors_per_node, store_per_node
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients
from orchestray.trainers.sync.common.messages import trade


def gradients_to_all(in_features: int, out_features: int, num_workers: int) -> int:
    """Return the values that P workers send in a bandwidth-optimal all-reduce: 2 (P-1) out in."""
    return 2 * (num_workers - 1) * out_features * in_features


class Factored(CombinedGradients):
    """An all-reduce whose fully connected layers may send inputs and errors; the same sum.

    A layer takes part if it is an `nn.Linear` that is called. Excluded is one whose weight is used by itself, tied to
    another or split over workers. In the first step with samples its factors are compared with its gradient. If they do
    not produce it, the layer sends gradients like every other parameter.

    Args:
        always: True to send factors even if they are larger than the gradient.
        store_shards: number of shards of a key-value store on the replicas, which sums what is not sent as factors.
            Each hosts one at most. 0: an all-reduce sums it.
    """

    def __init__(self, *, always: bool = False, store_shards: int = 0) -> None:
        super().__init__()
        self._always = always
        self._store_shards = store_shards
        self._store: ColocatedStore | None = None
        self.num_recomposed = 0
        """Number of products of other replicas' factors in the last step: P - 1 for each layer that sends factors."""
        self._layers: list[FullyConnected] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def prepare(self, model: nn.Module) -> None:
        self._layers = fully_connected_layers(model, self._parameters)
        modules = dict(model.named_modules())
        self._handles = [layer.watch(modules[layer.name]) for layer in self._layers]

    def num_flags(self, model: nn.Module) -> int:
        return len(fully_connected_layers(model, self._parameters))

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        num_shards = min(self._store_shards, collective.size)  # fewer, once replicas have left for good
        self._store = ColocatedStore(collective, num_shards) if num_shards and collective.size > 1 else None

    def detach(self) -> None:
        super().detach()
        self._store = None
        for handle in self._handles:
            handle.remove()
        self._layers, self._handles = [], []

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.bytes_beyond = 0
        for layer in self._layers:
            layer.clear()

    def flags(self) -> list[bool]:
        """Return, for each layer, True if its factors do not produce its gradient here."""
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
            self._sum(flat)
            for index, total in zip(chosen, unflatten(flat, same), strict=True):
                combined[index] = total
        for layer in self._layers:
            layer.clear()
        return combined

    def _sum(self, flat: Tensor) -> None:
        """Sum `flat` over all replicas in place: by the store, if there is one."""
        if self._store is None:
            self.joined().all_reduce(flat)
            return
        self._store.pull(self._store.push(flat), flat)
        # Replicas that host a shard send more than others; together they send what an all-reduce does.
        own, size = self._store.own_bytes(flat), self.joined().size
        self.bytes_saved += own - ring_bytes(flat, size)
        self.bytes_beyond += 2 * (size - 1) * flat.nbytes - size * own

    def _recompose(self, combined: list[Tensor]) -> set[int]:
        """Fill in the sums that factors produce; return their indices."""
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
        layer = self._layers[number]
        chosen = not layer.is_refused and (self._always or self._is_less(layer, rows_of_all))
        layer.way = "factors" if chosen else "gradient" if self._store is None else "store"
        return chosen

    def _is_less(self, layer: FullyConnected, rows_of_all: int) -> bool:
        """Return True if a layer's factors are less to send than its gradient."""
        size, widths = self.joined().size, (layer.in_features, layer.out_features)
        factors = factors_per_node(rows_of_all, *widths, size)  # of all nodes, which may have unlike numbers of rows
        if self._store is None:
            return factors < 2 * gradients_to_all(*widths, size)
        return factors <= size * store_per_node(*widths, size, self._store.num_shards)  # algorithm 1

    def _everybodys(
        self, numbers: Sequence[int], rows: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Return, for each layer, every rank's inputs and errors, in rank order.

        Args:
            numbers: indices of the layers.
            rows: number of rows of each layer on each rank, `[rank][layer]`.
            dtype: type of the factors.
        """
        layers = [self._layers[number] for number in numbers]
        device = self._parameters[layers[0].weight].device
        mine = as_bytes(torch.cat([layer.factors(device) for layer in layers]))
        widths = [(layer.in_features, layer.out_features) for layer in layers]
        lengths = [[n * width for n, both in zip(of_rank, widths, strict=True) for width in both] for of_rank in rows]
        messages = trade([mine] * len(rows), [sum(length) * dtype.itemsize for length in lengths], self.joined())
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        for length, message in zip(lengths, messages, strict=True):
            parts = iter(torch.split(from_bytes(message, dtype), length))
            for place, (num_in, num_out) in enumerate(widths):
                found[place].append((next(parts).view(-1, num_in), next(parts).view(-1, num_out)))
        return found

    def summary(self) -> dict[str, str]:
        """Return what each fully connected layer sent in the last step: `factors`; or `gradient`, or `store`
        if a store sums it.
        """
        return {layer.name: layer.way for layer in self._layers}

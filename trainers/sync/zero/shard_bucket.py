"""A bucket of which every replica owns some rows of each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.sync.common.buckets import Bucket
from orchestray.trainers.sync.zero.reduce_scatter import AllGather, ReduceScatter, Regions
from orchestray.trainers.sync.zero.row_sharding import Rows, cut_rows


class Spare:
    """A pool of flat memory that buckets take and give back: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return `numel` undefined elements of the dtype and device of `like`."""
        fitting = [
            spare
            for spare in self._free
            if spare.numel() >= numel and spare.dtype == like.dtype and spare.device == like.device
        ]
        if not fitting:
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        smallest = min(fitting, key=Tensor.numel)
        self._free = [spare for spare in self._free if spare is not smallest]
        return smallest[:numel]

    def give(self, taken: Tensor) -> None:
        base = taken if taken._base is None else taken._base
        self._free.append(base)

    def clear(self) -> None:
        self._free = []


class ShardBucket(Bucket):
    """Gradients in one flat tensor, ordered by the rank that owns them: `[rank][parameter][own rows]`.

    With a `Spare` the flat tensor exists only while it is filled and sent, and this rank's part has its own memory.
    Without one the tensor stays, and this rank's part is its region.
    """

    def __init__(self, parameters: list[Tensor], collective: Collective, spare: Spare | None) -> None:
        self._rank = collective.rank
        self._spare = spare
        self._kind = torch.empty(0, dtype=parameters[0].dtype, device=parameters[0].device)
        self._rows = cut_rows(parameters, collective.size)
        sizes = [0] * collective.size
        self._places: list[list[tuple[Rows, int, int]]] = []
        """Rows and elements of the rank's region, both as (start, stop), for each parameter and rank."""
        for parameter, cuts in zip(parameters, self._rows, strict=True):
            row_numel = parameter[:1].numel()
            places = []
            for rank, (start, stop) in enumerate(cuts):
                before = sizes[rank]
                sizes[rank] += (stop - start) * row_numel
                places.append(((start, stop), before, sizes[rank]))
            self._places.append(places)
        self.regions = Regions(sizes)
        self._flat: Tensor | None = None
        if spare is None:
            self._flat = self._kind.new_zeros(self.regions.numel)
            self.part = self.regions.of(self._flat, self._rank)
        else:
            self.part = self._kind.new_zeros(sizes[self._rank])
        super().__init__(parameters)

    def begin(self) -> None:
        super().begin()
        self._release()

    def own_rows(self, slot: int) -> Rows:
        return self._rows[slot][self._rank]

    def own_values(self, slot: int) -> Tensor:
        """Return this rank's rows of a parameter, in the parameter's memory."""
        start, stop = self.own_rows(slot)
        return self.parameters[slot].detach().narrow(0, start, stop - start)

    def own_gradient(self, slot: int) -> Tensor:
        """Return this rank's rows of the reduced gradient, in the bucket's memory."""
        _, start, stop = self._places[slot][self._rank]
        return self.part[start:stop].view(self.own_values(slot).shape)

    def store(self, slots: Sequence[int]) -> None:
        for slot in slots:
            parameter = self.parameters[slot]
            assert parameter.grad is not None
            for target, rows in self._by_rank(slot, dense(parameter.grad)):
                target.copy_(rows)
            parameter.grad = None

    def add(self, slot: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for target, rows in self._by_rank(slot, dense(parameter.grad)):
            target.add_(rows)
        parameter.grad = None

    def store_zeros(self, slot: int) -> None:
        for target, _ in self._by_rank(slot, self.parameters[slot].detach()):
            target.zero_()

    def start_reducing(self, collective: Collective, spare: Spare) -> ReduceScatter:
        return ReduceScatter(collective, self.regions, self._memory(), self.part, spare.take)

    def reduced(self) -> None:
        self._release()

    def start_gathering(self, collective: Collective, spare: Spare) -> AllGather:
        """Send this rank's updated rows to the others."""
        for slot, parameter in enumerate(self.parameters):
            target, rows = self._by_rank(slot, parameter.detach(), [self._rank])[0]
            target.copy_(rows)
        return AllGather(collective, self.regions, self._memory())

    def take_gathered(self) -> None:
        """Copy the others' rows into the parameters."""
        others = [rank for rank in range(len(self.regions.sizes)) if rank != self._rank]
        for slot, parameter in enumerate(self.parameters):
            for source, rows in self._by_rank(slot, parameter.detach(), others):
                rows.copy_(source)
        self._release()

    def _by_rank(self, slot: int, whole: Tensor, ranks: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return, for each of the ranks, its place in the flat tensor and its rows of `whole`, in the same shape."""
        flat = self._memory()
        pairs = []
        for rank in range(len(self.regions.sizes)) if ranks is None else ranks:
            (first, last), start, stop = self._places[slot][rank]
            rows = whole.narrow(0, first, last - first)
            pairs.append((self.regions.of(flat, rank)[start:stop].view(rows.shape), rows))
        return pairs

    def _memory(self) -> Tensor:
        if self._flat is None:
            assert self._spare is not None
            self._flat = self._spare.take(self.regions.numel, self._kind)
        return self._flat

    def _release(self) -> None:
        if self._spare is not None and self._flat is not None:
            self._spare.give(self._flat)
            self._flat = None

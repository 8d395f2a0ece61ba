"""Reduce-scatter and all-gather of parts that differ in size, over a flat tensor that holds each rank's region.

Gloo's own reduce-scatter is an all-reduce of the whole tensor (measured: twice the bytes, twice the time), and both
need parts of one size. So over gloo the parts are sent directly to the rank that owns them: as many bytes as around a
ring, (N-1)/N of the whole from each of N ranks, without padding. Over NCCL its own operations are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending


class Regions:
    """The layout of a flat tensor: rank r's elements begin at r x `stride`, and there are `sizes[r]` of them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.stride = max(sizes, default=0)
        self.numel = self.stride * len(self.sizes)

    def of(self, flat: Tensor, rank: int) -> Tensor:
        return flat.narrow(0, rank * self.stride, self.sizes[rank])


class ReduceScatter:
    """A reduce-scatter in flight; `wait` leaves the sum over the ranks of this rank's region in `out`."""

    def __init__(
        self,
        collective: Collective,
        regions: Regions,
        flat: Tensor,
        out: Tensor,
        take: Callable[[int, Tensor], Tensor],
    ) -> None:
        """Start the operation. All ranks do so in the same order.

        Args:
            collective: the ranks.
            regions: layout of `flat`, the same on every rank.
            flat: this rank's addends, shape `[regions.numel]`; must not change until `wait` has returned.
            out: memory for this rank's part, shape `[regions.sizes[rank]]`; may be its region of `flat`.
            take: returns memory for that many elements, of the kind of a tensor; it can be given back after `wait`.
        """
        self._rank = collective.rank
        self._out = out
        self._own = regions.of(flat, collective.rank)
        self.scratch: list[Tensor] = []
        self._pending: Pending
        if collective.has_native_scatter:
            self.scratch = [take(regions.stride, flat)]
            self._pending = collective.start_reduce_scatter(self.scratch[0], flat)
            self._own = self.scratch[0].narrow(0, 0, out.numel())
            self._received: list[Tensor] = []
            return
        others = [rank for rank in range(collective.size) if rank != collective.rank]
        self.scratch = [take(out.numel(), flat) for _ in others]
        self._received = self.scratch
        send = {rank: regions.of(flat, rank) for rank in others}
        self._pending = collective.start_exchange(send, dict(zip(others, self.scratch, strict=True)))

    def wait(self) -> None:
        """Wait for the sum; raise a `PeerLostError` if it will never be there."""
        self._pending.wait()
        # The others' parts are added in rank order, not in order of arrival: the same bits every time.
        first, *rest = [self._own, *self._received]
        if not rest:
            self._out.copy_(first)
            return
        torch.add(first, rest[0], out=self._out)
        for part in rest[1:]:
            self._out.add_(part)


class AllGather:
    """An all-gather in flight: after `wait` every rank's region of `flat` is filled."""

    def __init__(self, collective: Collective, regions: Regions, flat: Tensor) -> None:
        """Start the operation. All ranks do so in the same order; each has filled its own region of `flat`."""
        own = regions.of(flat, collective.rank)
        if collective.has_native_scatter:
            padded = flat.narrow(0, collective.rank * regions.stride, regions.stride)
            self._pending = collective.start_all_gather(flat, padded)
            return
        others = [rank for rank in range(collective.size) if rank != collective.rank]
        self._pending = collective.start_exchange(
            dict.fromkeys(others, own), {rank: regions.of(flat, rank) for rank in others}
        )

    def wait(self) -> None:
        """Wait for the other regions; raise a `PeerLostError` if they will never be there."""
        self._pending.wait()

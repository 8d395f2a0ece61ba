"""The sum of sparse vectors over a nested butterfly, which exchanges the indices first and the values after.

Zhao and Canny, "Kylix: A Sparse Allreduce for Commodity Clusters" (ICPP 2014), section 4. The number of replicas is a
product of degrees d1 d2 ... In layer i, groups of d_i replicas cut the range of indices that they share into d_i parts,
and each takes one. On the way down (scatter-reduce) a replica sends each member of its group the pairs of that member's
part, and merges what it gets; at the bottom each index is with one replica. On the way up (all-gather) the same groups
hand back the sums. The configuration pass goes both ways with indices alone, and the reduction with values alone. As
long as no replica's indices change, there is no configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.even_split import split_evenly
from orchestray.trainers.compression.base import as_bytes, from_bytes
from orchestray.trainers.compression.delta import decode_gaps, encode_gaps
from orchestray.trainers.sync.common.messages import message_of


def degrees_of(size: int) -> list[int]:
    """Return the prime factors of a number, the largest first: groups shrink towards the bottom, as vectors grow."""
    found, factor = list[int](), 2
    while size > 1:
        while size % factor == 0:
            found.append(factor)
            size //= factor
        factor += 1
    return found[::-1]


@dataclass
class _Layer:
    """The group of this replica in a layer, and what the configuration has found there."""

    members: list[int]
    """Ranks of the group, in the order of their parts."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """First index of each member's part, and the one after its last."""
    sent: list[int] = field(default_factory=list)
    """Number of this replica's values in each member's part."""
    places: list[Tensor] = field(default_factory=list)
    """Positions of each member's values among the merged ones of this replica's part."""
    num_merged: int = 0
    gathered: list[int] = field(default_factory=list)
    """Number of sums that each member hands up."""


class NestedButterfly:
    """A sum of sparse vectors of one length over the replicas, with the same bits on each.

    Args:
        collective: the replicas.
        num_values: length of the vectors.
        dtype: type of their values.
        degrees: size of the groups of each layer, from the top; their product is the number of replicas. None: its
            prime factors.
    """

    def __init__(
        self, collective: Collective, num_values: int, dtype: torch.dtype, degrees: Sequence[int] | None = None
    ) -> None:
        self._collective = collective
        self._num_values = num_values
        self._dtype = dtype
        self._layers: list[_Layer] = []
        first, last, distance = 0, num_values, collective.size
        for degree in degrees_of(collective.size) if degrees is None else degrees:
            distance //= degree
            digit = collective.rank // distance % degree
            begin = collective.rank - digit * distance
            cuts = [(first + start, first + stop) for start, stop in split_evenly(last - first, degree)]
            self._layers.append(_Layer([begin + each * distance for each in range(degree)], cuts))
            first, last = cuts[digit]
        self._indices: Tensor | None = None
        """Indices of this replica's last vector."""
        self._of_sum = torch.empty(0, dtype=torch.int64)
        """Indices of the sum, ascending."""
        self.num_configurations = 0

    def run_report(self) -> dict[str, Any]:
        """Return the `degrees` of the layers, and how often indices were exchanged, `configurations`; empty before."""
        if not self.num_configurations:
            return {}
        return {"degrees": [len(layer.members) for layer in self._layers], "configurations": self.num_configurations}

    def all_reduce(self, indices: Tensor, values: Tensor) -> Tensor:
        """Return the sum of every replica's vector.

        Args:
            indices: indices of this replica's values, ascending, int64 `[n]`.
            values: values, `[n]`.

        Returns:
            The dense sum, `[num_values]`.

        Raises:
            PeerLostError: another replica is gone.
        """
        repeats = self._indices is not None and torch.equal(indices, self._indices)
        if not bool(self._collective.all_gather(torch.tensor([int(repeats)])).all()):
            self._configure(indices)
        self._indices = indices
        total = torch.zeros(self._num_values, dtype=self._dtype, device=values.device)
        return total.index_copy_(0, self._of_sum, self._reduced(values))

    def _configure(self, indices: Tensor) -> None:
        """Send indices down and up, and keep what the values need to follow them."""
        self.num_configurations += 1
        for layer in self._layers:
            bounds = torch.tensor([start for start, _ in layer.cuts] + [layer.cuts[-1][1]], device=indices.device)
            ends = torch.searchsorted(indices, bounds).tolist()
            parts = [indices[start:stop] for start, stop in pairwise(ends)]
            layer.sent = [part.numel() for part in parts]
            found = self._traded_indices(layer.members, parts)
            indices = torch.cat(found).unique()  # type: ignore[no-untyped-call]
            layer.places = [torch.searchsorted(indices, theirs) for theirs in found]
            layer.num_merged = indices.numel()
        for layer in reversed(self._layers):
            found = self._traded_indices(layer.members, [indices] * len(layer.members))
            layer.gathered = [theirs.numel() for theirs in found]
            indices = torch.cat(found)  # ascending, since the members' parts are
        self._of_sum = indices

    def _reduced(self, values: Tensor) -> Tensor:
        """Return the sums of all values, at the indices of the sum."""
        for layer in self._layers:
            lengths = [each.numel() for each in layer.places]
            found = self._traded_values(layer.members, torch.split(values, layer.sent), lengths)
            values = torch.zeros(layer.num_merged, dtype=self._dtype, device=values.device)
            for places, theirs in zip(layer.places, found, strict=True):
                values.index_add_(0, places, theirs)
        for layer in reversed(self._layers):
            values = torch.cat(self._traded_values(layer.members, [values] * len(layer.members), layer.gathered))
        return values

    def _traded_indices(self, members: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
        """Send each member its part of the indices, after the length of the message, and return theirs."""
        messages = [encode_gaps(part.contiguous()) for part in parts]
        sizes = [torch.tensor([message.numel()]) for message in messages]
        lengths = self._traded(members, sizes, [torch.empty(1, dtype=torch.int64) for _ in members])
        into = [message_of(int(length), parts[0].device) for length in lengths]
        return [decode_gaps(each) for each in self._traded(members, messages, into)]

    def _traded_values(self, members: Sequence[int], parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        messages = [as_bytes(part.contiguous()) for part in parts]
        into = [message_of(length * self._dtype.itemsize, parts[0].device) for length in lengths]
        return [from_bytes(each, self._dtype) for each in self._traded(members, messages, into)]

    def _traded(self, members: Sequence[int], messages: Sequence[Tensor], into: Sequence[Tensor]) -> list[Tensor]:
        """Send a message to each member and receive one from each; this replica's own stays here."""
        rank = self._collective.rank
        send = {peer: message for peer, message in zip(members, messages, strict=True) if peer != rank}
        receive = {peer: memory for peer, memory in zip(members, into, strict=True) if peer != rank}
        self._collective.start_exchange(send, receive).wait()
        mine = members.index(rank)
        return [
            message if place == mine else memory
            for place, (message, memory) in enumerate(zip(messages, into, strict=True))
        ]

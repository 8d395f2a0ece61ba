"""Sums over the replicas in a code: who sends which message to whom.

A code of all values goes the way of a bandwidth-optimal all-reduce, 2(P-1)/P of a message each: worker i encodes chunk
j for worker j, who decodes and adds up, encodes the sum, and sends it to all (Seide et al., "1-Bit Stochastic Gradient
Descent and its Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, section 3.3, where
the sums are quantised too, with error feedback of their own). Where everybody getting everybody's message is no more,
as with two workers, that is done: a value is then rounded once. A code of few values is merged on its way (sparse.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from orchestray.platform.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.compression import Compressor, SparseCompressor
from orchestray.trainers.exchange.lockstep import flatten, typed, unflatten
from orchestray.trainers.exchange.messages import gather_messages, trade
from orchestray.trainers.exchange.sparse import SparseSum
from orchestray.trainers.layout.pieces import split_evenly

MakeCompressor = Callable[[int], Compressor]
"""A compressor whose random draws depend on the number too."""


class CodedSum(Protocol):
    """The sum over the replicas of a list of tensors, in a code."""

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        """The sums, the same bits everywhere. All replicas call; PeerLostError if one is gone."""

    def kept(self) -> dict[str, list[Tensor]]:
        """What is kept from one step to the next, by kind: of each tensor one of its shape, or a number."""

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Go on from what `kept` gave; None: nothing was kept of that tensor."""

    def error_squared(self) -> float:
        """The square of the 2-norm of what the last step's messages of this replica lost."""


def coded_sum(make: MakeCompressor, tensors: Sequence[Tensor], collective: Collective) -> CodedSum:
    """The way of summing that suits the code and sends least.

    Args:
        make: a compressor.
        tensors: like those to be summed.
        collective: the replicas, more than one.
    """
    whole = make(0)
    whole.init(tensors)
    if isinstance(whole, SparseCompressor):
        return MergedSum(whole, tensors, collective)
    size, num_values = collective.size, sum(tensor.numel() for tensor in tensors)
    if size == 2 or num_values < size:
        return GatheredSum(whole, tensors, collective)
    chunked = ChunkedSum(make, tensors, collective)
    if whole.message_bytes is None or chunked.bytes_of_all is None:
        return chunked
    is_less = size * (size - 1) * whole.message_bytes <= chunked.bytes_of_all
    return GatheredSum(whole, tensors, collective) if is_less else chunked


class GatheredSum:
    """Everybody gets everybody's message: (P-1) messages each, every value rounded once."""

    def __init__(self, compressor: Compressor, tensors: Sequence[Tensor], collective: Collective) -> None:
        self._compressor = compressor
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._collective = collective

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        message = self._compressor.compress(tensors, step=step)
        messages = gather_messages(self._collective, message, self._compressor.message_bytes)
        return added_up([self._compressor.decompress(each) for each in messages])

    def kept(self) -> dict[str, list[Tensor]]:
        return kept_by(self._compressor, self._like)

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        keep_in(self._compressor, kept, self._like)

    def error_squared(self) -> float:
        return self._compressor.error_norm**2


class ChunkedSum:
    """Chunk j of everybody is added up by rank j, and the sum sent to all: 2(P-1)/P of a message each."""

    def __init__(self, make: MakeCompressor, tensors: Sequence[Tensor], collective: Collective) -> None:
        self._collective = collective
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._bounds = split_evenly(sum(tensor.numel() for tensor in tensors), collective.size)
        self._sizes = [_sizes_within([tensor.numel() for tensor in tensors], *bounds) for bounds in self._bounds]
        flat = flatten(tensors)
        self._to: list[Compressor] = []
        """Compresses for each rank, and reads what it says of its chunk's sum."""
        for rank in range(collective.size):
            compressor = make(1 + rank)
            compressor.init(self._cut(flat, rank))
            self._to.append(compressor)
        self._sum = make(1 + collective.size + collective.rank)
        self._sum.init(self._cut(flat, collective.rank))

    @property
    def bytes_of_all(self) -> int | None:
        """What all ranks together send; None if that differs from step to step."""
        lengths = [compressor.message_bytes for compressor in self._to]
        known = [length for length in lengths if length is not None]
        return 2 * (self._collective.size - 1) * sum(known) if len(known) == len(lengths) else None

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        collective, rank = self._collective, self._collective.rank
        flat = flatten(tensors)
        messages = [compressor.compress(self._cut(flat, peer), step=step) for peer, compressor in enumerate(self._to)]
        own = self._to[rank]
        received = trade(messages, self._lengths_to_me(messages), collective)
        total = added_up([own.decompress(message) for message in received])
        message = self._sum.compress(total, step=step)
        sums = trade([message] * collective.size, self._lengths_of_sums(message), collective)
        parts = [compressor.decompress(message) for compressor, message in zip(self._to, sums, strict=True)]
        return typed(unflatten(torch.cat([flatten(part) for part in parts]), self._like), self._like)

    def _cut(self, flat: Tensor, rank: int) -> list[Tensor]:
        """The parts of tensors that are in a rank's chunk."""
        start, stop = self._bounds[rank]
        return list(torch.split(flat[start:stop], self._sizes[rank]))

    def _lengths_to_me(self, messages: Sequence[Tensor]) -> list[int]:
        size, rank = self._collective.size, self._collective.rank
        if (length := self._to[rank].message_bytes) is not None:
            return [length] * size
        lengths = torch.tensor([message.numel() for message in messages])
        to_me: list[int] = self._collective.all_gather(lengths)[:, rank].tolist()
        return to_me

    def _lengths_of_sums(self, message: Tensor) -> list[int]:
        lengths = [compressor.message_bytes for compressor in self._to]
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths):
            return known
        told: list[int] = self._collective.all_gather(torch.tensor([message.numel()])).flatten().tolist()
        return told

    def kept(self) -> dict[str, list[Tensor]]:
        """What was lost on the way to the chunks, and by this rank's sums: of the other chunks' elements zeros."""
        start, stop = self._bounds[self._collective.rank]
        kept: dict[str, list[Tensor]] = {}
        for kind, own in self._sum.state().items():
            lost = torch.cat([flatten(to.views(to.state()[kind])) for to in self._to])
            kept[kind] = unflatten(lost, self._like)
            of_sums = torch.zeros_like(lost)
            of_sums[start:stop] = flatten(self._sum.views(own))
            kept[f"sum_{kind}"] = unflatten(of_sums, self._like)
        return kept

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        start, stop = self._bounds[self._collective.rank]
        for kind, own in self._sum.state().items():
            lost, of_sums = self._flat(kept[kind], own), self._flat(kept[f"sum_{kind}"], own)
            torch._foreach_copy_(self._sum.views(own), self._cut(of_sums, self._collective.rank))
            of_sums[start:stop] = 0
            lost += of_sums  # chunks may lie elsewhere than where this was saved: nothing of it is lost
            for rank, to in enumerate(self._to):
                torch._foreach_copy_(to.views(to.state()[kind]), self._cut(lost, rank))

    def _flat(self, tensors: Sequence[Tensor | None], own: Tensor) -> Tensor:
        whole = [
            own.new_zeros(like.shape) if tensor is None else tensor.to(own.dtype)
            for tensor, like in zip(tensors, self._like, strict=True)
        ]
        return flatten(whole)

    def error_squared(self) -> float:
        return float(sum(compressor.error_norm**2 for compressor in (*self._to, self._sum)))


class MergedSum:
    """Few values with their places, merged."""

    def __init__(self, compressor: SparseCompressor, tensors: Sequence[Tensor], collective: Collective) -> None:
        self._compressor = compressor
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        self._sum = SparseSum(collective, compressor.num_values, dtype)

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        indices, values = self._compressor.compress_sparse(tensors, step=step)
        return typed(unflatten(self._sum.all_reduce(indices, values), self._like), self._like)

    def kept(self) -> dict[str, list[Tensor]]:
        return kept_by(self._compressor, self._like)

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        keep_in(self._compressor, kept, self._like)

    def error_squared(self) -> float:
        return self._compressor.error_norm**2


def kept_by(compressor: Compressor, like: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What a compressor keeps, by kind: of each of its tensors one of that shape, or a number."""
    kept = {}
    for kind, tensor in compressor.state().items():
        if tensor.numel() == sum(template.numel() for template in like):
            kept[kind] = compressor.views(tensor)
        elif tensor.numel() == len(like):
            kept[kind] = list(tensor.view(-1).unbind())
        else:
            raise TrainingError(
                f"The compression keeps {tensor.numel()} values as {kind!r}, which no checkpoint has room for: it must "
                "be one a tensor, or one an element."
            )
    return kept


@torch.no_grad()
def keep_in(compressor: Compressor, kept: Mapping[str, Sequence[Tensor | None]], like: Sequence[Tensor]) -> None:
    """Have a compressor go on from what `kept_by` gave."""
    for kind, places in kept_by(compressor, like).items():
        for place, tensor in zip(places, kept[kind], strict=True):
            if tensor is not None:
                place.copy_(tensor)


def added_up(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of lists of tensors, in their order."""
    total = [tensor.clone() for tensor in lists[0]]
    for more in lists[1:]:
        torch._foreach_add_(total, list(more))
    return total


def _sizes_within(sizes: Sequence[int], start: int, stop: int) -> list[int]:
    """How much of each of some consecutive tensors lies from `start` up to `stop`, where it is not nothing."""
    found, before = [], 0
    for size in sizes:
        inside = min(before + size, stop) - max(before, start)
        if inside > 0:
            found.append(inside)
        before += size
    return found

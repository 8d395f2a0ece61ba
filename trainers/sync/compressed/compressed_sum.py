"""Compressed sums over the replicas, and the messages that they send.

A compressor of all values is used as in a bandwidth-optimal all-reduce, 2(P-1)/P of a message each. Worker i encodes
chunk j for worker j, which decodes and sums, encodes the sum, and sends it to all. The sums are quantised too, with
their own error feedback. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014, section 3.3.

If sending every message to everybody is no more, as with two workers, that is done: a value is then rounded once. A
compressor of few values merges them on the way (sparse_sum.py), or over a butterfly (nested_butterfly.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import TrainingError
from orchestray.trainers.compression.base import Compressor, SparseCompressor
from orchestray.trainers.sync.common.combined_gradients import typed
from orchestray.trainers.sync.common.messages import gather_messages, trade
from orchestray.trainers.sync.compressed.nested_butterfly import NestedButterfly
from orchestray.trainers.sync.compressed.sparse_sum import SparseSum

MakeCompressor = Callable[[int], Compressor]
"""Function that returns a compressor whose random draws depend on the number too."""


class CodedSum(Protocol):
    """The sum over the replicas of a list of tensors, compressed."""

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return the sums, the same bits everywhere. All replicas call this; raise a PeerLostError if one is gone."""

    def kept(self) -> dict[str, list[Tensor]]:
        """Return what is kept from one step to the next, by kind: for each tensor one of its shape, or a number."""

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Restore what `kept` returned; None for a tensor of which nothing was kept."""

    def error_squared(self) -> float:
        """Return the squared 2-norm of what this replica's messages of the last step lost."""


def coded_sum(
    make: MakeCompressor, tensors: Sequence[Tensor], collective: Collective, *, is_nested: bool = False
) -> CodedSum:
    """Return the sum that suits the compressor and sends least.

    Args:
        make: makes a compressor.
        tensors: tensors of the shapes and types to sum.
        collective: the replicas, more than one.
        is_nested: True to sum a few values over a nested butterfly.
    """
    whole = make(0)
    whole.init(tensors)
    if isinstance(whole, SparseCompressor):
        return MergedSum(whole, tensors, collective, is_nested=is_nested)
    size, num_values = collective.size, sum(tensor.numel() for tensor in tensors)
    if size == 2 or num_values < size:
        return GatheredSum(whole, tensors, collective)
    chunked = ChunkedSum(make, tensors, collective)
    if whole.message_bytes is None or chunked.bytes_of_all is None:
        return chunked
    is_less = size * (size - 1) * whole.message_bytes <= chunked.bytes_of_all
    return GatheredSum(whole, tensors, collective) if is_less else chunked


class _OneCompressor:
    """The part that sums by one compressor of all tensors share: what it keeps."""

    def __init__(self, compressor: Compressor, tensors: Sequence[Tensor]) -> None:
        self._compressor = compressor
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]

    def kept(self) -> dict[str, list[Tensor]]:
        """Return what the compressor keeps, by kind: for each of its tensors one of that shape, or a number."""
        kept = {}
        for kind, tensor in self._compressor.state().items():
            if tensor.numel() == sum(template.numel() for template in self._like):
                kept[kind] = self._compressor.views(tensor)
            elif tensor.numel() == len(self._like):
                kept[kind] = list(tensor.view(-1).unbind())
            else:
                raise TrainingError(
                    f"The compression keeps {tensor.numel()} values as {kind!r}, which no checkpoint has room for: it "
                    "must be one a tensor, or one an element."
                )
        return kept

    @torch.no_grad()
    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Restore the compressor's state from what `kept` returned."""
        for kind, places in self.kept().items():
            for place, tensor in zip(places, kept[kind], strict=True):
                if tensor is not None:
                    place.copy_(tensor)

    def error_squared(self) -> float:
        return self._compressor.error_norm**2


class GatheredSum(_OneCompressor):
    """A sum for which everybody gets everybody's message: (P-1) messages each, every value rounded once."""

    def __init__(self, compressor: Compressor, tensors: Sequence[Tensor], collective: Collective) -> None:
        super().__init__(compressor, tensors)
        self._collective = collective

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        message = self._compressor.compress(tensors, step=step)
        messages = gather_messages(self._collective, message, self._compressor.message_bytes)
        return added_up([self._compressor.decompress(each) for each in messages])


class ChunkedSum:
    """A sum whose chunk j is added up by rank j, and sent to all: 2(P-1)/P of a message each."""

    def __init__(self, make: MakeCompressor, tensors: Sequence[Tensor], collective: Collective) -> None:
        self._collective = collective
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._bounds = split_evenly(sum(tensor.numel() for tensor in tensors), collective.size)
        self._shapes = [_shapes_within([tensor.shape for tensor in tensors], *bounds) for bounds in self._bounds]
        flat = flatten(tensors)
        self._to: list[Compressor] = []
        """Compressor for each rank, which also decodes that rank's sum."""
        for rank in range(collective.size):
            compressor = make(1 + rank)
            compressor.init(self._cut(flat, rank))
            self._to.append(compressor)
        self._sum = make(1 + collective.size + collective.rank)
        self._sum.init(self._cut(flat, collective.rank))

    @property
    def bytes_of_all(self) -> int | None:
        """Bytes that all ranks together send; None if they differ from step to step."""
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
        """Return the parts of tensors that are in a rank's chunk."""
        start, stop = self._bounds[rank]
        parts = torch.split(flat[start:stop], [math.prod(shape) for shape in self._shapes[rank]])
        return [part.view(shape) for part, shape in zip(parts, self._shapes[rank], strict=True)]

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
        gathered: list[int] = self._collective.all_gather(torch.tensor([message.numel()])).flatten().tolist()
        return gathered

    def kept(self) -> dict[str, list[Tensor]]:
        """Return what was lost on the way to the chunks, and by this rank's sums (zeros for other chunks' elements)."""
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
            lost += of_sums  # chunk bounds may differ from those at the save: nothing may be lost
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


class MergedSum(_OneCompressor):
    """A sum of few values with their indices, merged on the way."""

    def __init__(
        self,
        compressor: SparseCompressor,
        tensors: Sequence[Tensor],
        collective: Collective,
        *,
        is_nested: bool = False,
    ) -> None:
        super().__init__(compressor, tensors)
        self._compressor: SparseCompressor = compressor
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        self.num_values = compressor.num_values
        self._sum: NestedButterfly | SparseSum
        if is_nested:
            self._sum = NestedButterfly(collective, self.num_values, dtype)
        else:
            self._sum = SparseSum(collective, self.num_values, dtype, coder=compressor)
        self.num_sent = 0
        """Number of values that this replica sent in the last step, of `num_values`."""

    def all_reduce(self, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
        indices, values = self._compressor.compress_sparse(tensors, step=step)
        self.num_sent = indices.numel()
        return typed(unflatten(self._sum.all_reduce(indices, values), self._like), self._like)


def added_up(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sum of lists of tensors, in their order."""
    total = [tensor.clone() for tensor in lists[0]]
    for more in lists[1:]:
        torch._foreach_add_(total, list(more))
    return total


def _shapes_within(shapes: Sequence[torch.Size], start: int, stop: int) -> list[tuple[int, ...]]:
    """Return the shapes of what lies of some consecutive tensors from `start` up to `stop`, without empty ones."""
    found, before = list[tuple[int, ...]](), 0
    for shape in shapes:
        first, last = max(start - before, 0), min(stop - before, shape.numel())
        if first < last:
            found += _parts_within(shape, first, last)
        before += shape.numel()
    return found


def _parts_within(shape: torch.Size, first: int, last: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parts of a tensor from an element up to another: its whole rows, and what is left.

    A code may have a scale for each row, which a flat part would not know.
    """
    if len(shape) < 2:
        return [(last - first,)]
    width = shape.numel() // shape[0]
    begin = min(-(-first // width) * width, last)
    end = max(last // width * width, begin)
    parts = [(begin - first,), ((end - begin) // width, width), (last - end,)]
    return [part for part in parts if math.prod(part)]

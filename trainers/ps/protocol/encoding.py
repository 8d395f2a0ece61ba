"""The encoding of a gradient for each shard: dense, by rows or factors, or compressed; and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.factors import FactoredGradient
from orchestray.trainers.ps.protocol.partition import Partition, Slice, slice_views
from orchestray.trainers.ps.protocol.requests import COMPRESSED, DENSE, FACTORS, RUNS, Encoding
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings

Gradient = Tensor | list[Tensor] | RowSparseGradient | FactoredGradient
"""Gradient of all parameters: `[elements]`; or one flat tensor per parameter; or some of the rows; or with factors."""
_PIECE_BYTES = 128 * 1024
"""Mean size from which on tensors are sent one by one; below it, copying them together is faster."""


class GradientEncoder:
    """An encoder of one worker's gradients.

    Attributes:
        compressors: one per shard; None: gradients are not compressed.
        bytes_dense: bytes that the gradients would have without compression.
        bytes_saved: bytes saved by it.
        has_news: True if the compressors' state has changed since this was last set to False.
    """

    def __init__(
        self,
        partition: Partition,
        values: Tensor,
        compressors: Sequence[Compressor] | None,
        *,
        can_take_back: bool = False,
    ) -> None:
        """
        Args:
            partition: partition of the parameters.
            values: the parameters, `[elements]`.
            compressors: one per shard, initialised here; None: gradients are not compressed.
            can_take_back: True to keep what `take_back` needs, a copy of each compressor's state.
        """
        self.compressors = compressors
        self.bytes_dense = self.bytes_saved = 0
        self._partition, self._value_bytes = partition, values.element_size()
        self.has_news = False
        self._can_take_back = can_take_back
        self._before: dict[int, dict[str, Tensor]] = {}
        """State of each shard's compressor before its last message."""
        self._slices = [partition.slices(shard) for shard in range(partition.num_shards)]
        for compressor, slices, part in zip(compressors or (), self._slices, partition.cut(values), strict=False):
            compressor.init(slice_views(slices, part))

    @property
    def error(self) -> float:
        """Norm of the compressors' residuals."""
        return float(sum(compressor.error_norm**2 for compressor in self.compressors or ()) ** 0.5)

    def encode(self, shard: int, gradient: Gradient, step: int) -> tuple[Encoding, list[Tensor]]:
        """Return a shard's part of a gradient: its encoding, and the tensors to send.

        Args:
            shard: index of the shard.
            gradient: gradient of all parameters.
            step: step that the gradient is for.
        """
        first, last = self._partition.bounds[shard]
        dense_bytes = (last - first) * self._value_bytes
        self.bytes_dense += dense_bytes
        if isinstance(gradient, RowSparseGradient | FactoredGradient):
            part = gradient.cut(first, last)
            self.bytes_saved += dense_bytes - part.num_bytes
            return RUNS if isinstance(part, RowSparseGradient) else FACTORS, part.tensors
        pieces = self._partition.cut_each(gradient, shard) if isinstance(gradient, list) else [gradient[first:last]]
        if self.compressors is not None:
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            if self._can_take_back:
                self._before[shard] = {name: each.clone() for name, each in self.compressors[shard].state().items()}
            message = self.compressors[shard].compress(slice_views(self._slices[shard], whole), step=step)
            self.bytes_saved += dense_bytes - message.nbytes
            self.has_news = bool(self.compressors[shard].state())
            return COMPRESSED, [message]
        if len(pieces) > 1 and dense_bytes < len(pieces) * _PIECE_BYTES:
            return DENSE, [torch.cat(pieces)]
        return DENSE, pieces

    def take_back(self, shard: int) -> None:
        """Have a shard's compressor go on as if its last message had not been made: it is in no parameters."""
        if self.compressors is not None and shard in self._before:
            self.compressors[shard].load_state(self._before[shard])


class GradientDecoder:
    """A decoder of all workers' gradients for one shard."""

    def __init__(self, slices: Sequence[Slice], like: Tensor, compressor: Compressor | None = None) -> None:
        """
        Args:
            slices: slices of the shard.
            like: tensor with the shape, dtype and device of the shard's values.
            compressor: compressor made like the workers' compressors for this shard; initialised here.
        """
        self._compressor = compressor
        self._slices = slices
        self._memory = partial(torch.empty, like.shape, dtype=like.dtype, device=like.device)
        if compressor is not None:
            compressor.init(slice_views(slices, like))

    def decode(self, encoding: Encoding, tensors: Sequence[Tensor]) -> tuple[Tensor, BufferPush | None]:
        """Return the gradient, `[elements]`, and the changes of the model's buffers, if they follow it.

        Args:
            encoding: encoding of the gradient.
            tensors: tensors of the push; those of a dense gradient are one.

        Raises:
            TrainingError: the gradient is compressed, and this server knows of no compression.
        """
        if encoding == DENSE:
            gradient, rest = tensors[0], tensors[1:]
        elif encoding == RUNS:
            gradient, rest = RowSparseGradient(*tensors[:3]).fill(self._memory()), tensors[3:]
        elif encoding == FACTORS:
            gradient, rest = FactoredGradient.of_tensors(tensors[:5]).fill(self._memory()), tensors[5:]
        else:
            if self._compressor is None:
                raise TrainingError("A worker sent a compressed gradient, and this server knows of no compression.")
            gradient, rest = self._memory(), tensors[1:]
            parts = self._compressor.decompress(tensors[0])
            for view, part in zip(slice_views(self._slices, gradient), parts, strict=True):
                view.copy_(part)
        return gradient, BufferPush(*rest) if rest else None


def compressor_of(settings: ReplicaSettings, worker: int) -> Compressor | None:
    """Return a compressor for the gradients of a worker; None: the run compresses none."""
    if settings.compression.get("type", "none") == "none":
        return None
    return make_compressor(**settings.compression, seed=settings.seed, worker=worker, num_workers=settings.layout.data)

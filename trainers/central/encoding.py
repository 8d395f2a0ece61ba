"""What a worker sends of a gradient to each shard: as it is, without its zeros, or compressed; and the bytes saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.trainers.central.messages import COMPRESSED, DENSE, RUNS, SPARSE
from orchestray.trainers.central.partition import Partition, slice_views
from orchestray.trainers.central.runs import Runs
from orchestray.trainers.compression.base import Compressor

Sparse = tuple[Tensor, Tensor]
"""Places (int64, all different, ascending) and values of a gradient that is zero elsewhere."""
Gradient = Tensor | list[Tensor] | Sparse | Runs
"""Of all parameters: `[elements]`, or of each parameter its own, flat; or a few of the values, or of the rows."""
_PIECE_BYTES = 128 * 1024
"""From this mean size on, tensors are sent as they are: below it, copying them together is faster."""


class GradientEncoder:
    """Of one worker.

    Attributes:
        compressors: one a shard; None: gradients are sent as they are.
        bytes_dense: of the gradients, had none been compressed.
        bytes_saved: by compressing them.
    """

    def __init__(self, partition: Partition, values: Tensor, compressors: Sequence[Compressor] | None) -> None:
        """
        Args:
            partition: of the parameters.
            values: the parameters, `[elements]`.
            compressors: see the attribute; initialised here.
        """
        self.compressors = compressors
        self.bytes_dense = self.bytes_saved = 0
        self._partition, self._value_bytes = partition, values.element_size()
        self._has_news = False
        parts = partition.cut(values)
        for shard, compressor in enumerate(compressors or ()):
            compressor.init(slice_views(partition.slices(shard), parts[shard]))

    @property
    def error(self) -> float:
        """The norm of what the compressors keep."""
        return float(sum(compressor.error_norm**2 for compressor in self.compressors or ()) ** 0.5)

    def take_news(self) -> bool:
        """Whether what the compressors keep has changed since this was asked."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def encode(self, shard: int, gradient: Gradient, step: int) -> tuple[str, list[Tensor]]:
        """The part of a gradient that a shard gets: the name of its encoding (`messages`), and the tensors to send.

        Args:
            shard: whose part.
            gradient: of all parameters.
            step: that it is for.
        """
        first, last = self._partition.bounds[shard]
        dense_bytes = (last - first) * self._value_bytes
        self.bytes_dense += dense_bytes
        if isinstance(gradient, Runs):
            part = gradient.cut(first, last)
            self.bytes_saved += dense_bytes - part.num_bytes
            return RUNS, part.tensors
        if isinstance(gradient, tuple):
            places, values = gradient
            begin, end = torch.searchsorted(places, torch.tensor([first, last])).tolist()
            return SPARSE, [places[begin:end] - first, values[begin:end]]
        slices = self._partition.slices(shard)
        pieces = self._partition.cut_each(gradient, shard) if isinstance(gradient, list) else [gradient[first:last]]
        if self.compressors is not None:
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            message = self.compressors[shard].compress(slice_views(slices, whole), step=step)
            self.bytes_saved += dense_bytes - message.nbytes
            self._has_news = bool(self.compressors[shard].state())
            return COMPRESSED, [message]
        if len(pieces) > 1 and dense_bytes < len(pieces) * _PIECE_BYTES:
            return DENSE, [torch.cat(pieces)]
        return DENSE, pieces

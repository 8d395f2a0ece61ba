"""Memory that two processes of a machine see at once, so that a tensor in it need not be copied to be sent.

A block is an anonymous file, mapped by the process that made it and by those it is offered to over a channel. It has no
name, and vanishes with the last process that has it open or mapped, also after SIGKILL. Who may read or write which
part of it when is for the messages of the two to settle; see `Channel.lend`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from orchestray.platform.channel.base import ChannelMismatchError

_ALIGNMENT = 64
"""Bytes: a line of the cache."""
Place = list[Any]
"""Of a tensor in a block, as JSON: dtype, shape, whose block (0: the teller's own), which, from which byte on."""


def room_for(tensors: Sequence[Tensor]) -> int:
    """Bytes of a block in which each of these can be taken once."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


class SharedBlock:
    """Shared memory of a fixed size, all zeros at first. Lives as long as it, or a tensor in it, is referred to."""

    def __init__(self, memory_file: int) -> None:
        """Map an anonymous file, which is the block's own from now on, also if this fails."""
        self.file = memory_file
        self.num_bytes = os.fstat(memory_file).st_size
        self._map = mmap.mmap(memory_file, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._taken = 0

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """New memory; Linux only."""
        memory_file = os.memfd_create("orchestray-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory_file, max(1, num_bytes))
        except BaseException:
            os.close(memory_file)
            raise
        # A file that is closed twice may be somebody else's by then.
        return cls(memory_file)

    def take(self, like: Tensor) -> Tensor:
        """The next part of it, as a tensor of this dtype and shape, contiguous; ValueError when there is no room."""
        num_bytes = like.numel() * like.element_size()
        if self._taken + num_bytes > self.num_bytes:
            raise ValueError(f"a block of {self.num_bytes} bytes has {self.num_bytes - self._taken} left")
        taken = self.at(self._taken, like.dtype, tuple(like.shape))
        self._taken += _padded(num_bytes)
        return taken

    def at(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor from this byte on; ChannelMismatchError where that is not within the block."""
        count = torch.Size(shape).numel()
        if start < 0 or start % dtype.itemsize or start + count * dtype.itemsize > self.num_bytes:
            raise ChannelMismatchError(
                f"a tensor {dtype} {list(shape)} from byte {start} on is not within {self.num_bytes}"
            )
        if not count:  # torch makes no tensor of nothing
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def find(self, tensor: Tensor) -> int | None:
        """The byte at which a tensor begins that lies within; None: it does not, or has gaps."""
        start = tensor.data_ptr() - self._start
        num_bytes = tensor.numel() * tensor.element_size()
        is_within = start >= 0 and start + num_bytes <= self.num_bytes
        return start if is_within and tensor.device.type == "cpu" and tensor.is_contiguous() else None

    def close(self) -> None:
        """It can be offered to nobody else; may be called twice. Tensors in it stay."""
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self.close()


class Blocks:
    """The blocks that the two ends of a channel have offered each other."""

    def __init__(self) -> None:
        self.ours: list[SharedBlock] = []
        self.theirs: list[SharedBlock] = []

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a tensor lies; None: in no block."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        for whose, blocks in enumerate((self.ours, self.theirs)):
            for index, block in enumerate(blocks):
                start = 0 if not tensor.numel() else block.find(tensor)
                if start is not None:
                    return [dtype, list(tensor.shape), whose, index, start]
        return None

    def tensor_at(self, place: Place) -> Tensor:
        """What the other end told the place of."""
        name, shape, whose, index, start = place
        blocks, dtype = (self.theirs, self.ours)[int(whose)], getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not 0 <= index < len(blocks):
            raise ChannelMismatchError(f"the peer lent a tensor {name} in block {index}; it has offered {len(blocks)}")
        return blocks[index].at(start, dtype, tuple(shape))

    def clear(self) -> None:
        """Let go of them; tensors that are still referred to stay."""
        for block in self.theirs:
            block.close()
        self.ours.clear()
        self.theirs.clear()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

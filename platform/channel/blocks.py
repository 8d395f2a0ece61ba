"""Memory that two processes of a machine see at once, so that a tensor in it need not be copied to be sent.

A block is an anonymous file, mapped by the process that made it and by those it is offered to over a channel. It has no
name, and vanishes with the last process that has it open or mapped, also after SIGKILL. Who may read or write which
part of it when is for the messages of the two to settle; see `Channel.lend`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.channel.base import ChannelMismatchError

_ALIGNMENT = 64
"""Bytes: a line of the cache."""
_SEAL_FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE` of Linux (5.1), which `fcntl` has no name for."""
_IS_THERE, _OF_A_FILE = np.uint64(0b11 << 62), np.uint64(1 << 61)
"""Bits of an entry of Linux' pagemap: present or swapped out; of a file or shared."""
Place = list[Any]
"""Of a tensor in a block, as JSON: dtype, shape, whose block (0: the teller's own), which, from which byte on."""


def room_for(tensors: Sequence[Tensor]) -> int:
    """Bytes of a block in which each of these can be taken once."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


class SharedBlock:
    """Shared memory of a fixed size, all zeros at first. Lives as long as it, or a tensor in it, is referred to."""

    def __init__(self, memory_file: int) -> None:
        """Map an anonymous file, which is the block's own from now on, also if this fails.

        One that its owner has sealed is seen as the owner changes it, but for pages that are written to here: of these
        this process has a copy from then on, which nobody else sees.
        """
        self.file = memory_file
        self.num_bytes = os.fstat(memory_file).st_size
        self._is_private = bool(fcntl.fcntl(memory_file, fcntl.F_GET_SEALS) & _SEAL_FUTURE_WRITE)
        # A private mapping is not populated: that would copy each page of it.
        flags = mmap.MAP_PRIVATE if self._is_private else mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(memory_file, self.num_bytes, flags=flags)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._taken = 0

    @classmethod
    def create(cls, num_bytes: int, *, is_mine: bool = False) -> Self:
        """New memory; Linux only.

        Args:
            num_bytes: how much.
            is_mine: whether no other process may change it, whatever it tries.
        """
        memory_file = os.memfd_create("orchestray-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory_file, max(1, num_bytes))
        except BaseException:
            os.close(memory_file)
            raise
        # A file that is closed twice may be somebody else's by then.
        block = cls(memory_file)
        if is_mine:
            with suppress(OSError):  # an older kernel: others are trusted
                fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        return block

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

    def see_anew(self) -> None:
        """Let go of pages that were written to here, so that all of it is again what its owner has there."""
        if self._is_private and _has_own_pages(self._start, self.num_bytes):
            self._map.madvise(mmap.MADV_DONTNEED)

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
        if not whose:
            blocks[index].see_anew()
        return blocks[index].at(start, dtype, tuple(shape))

    def clear(self) -> None:
        """Let go of them; tensors that are still referred to stay."""
        for block in self.theirs:
            block.close()
        self.ours.clear()
        self.theirs.clear()


def _has_own_pages(start: int, num_bytes: int) -> bool:
    """Whether some of the pages from this address on are this process's own, and not those of the file mapped there."""
    first, end = start // mmap.PAGESIZE, -(-(start + num_bytes) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - pathlib's would be buffered
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * (end - first), 8 * first), dtype="<u8")
    except OSError:
        return True  # it is not known: they are looked up again
    return bool(((entries & _IS_THERE != 0) & (entries & _OF_A_FILE == 0)).any())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

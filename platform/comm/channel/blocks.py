"""Memory shared by two processes of a machine: blocks, in which tensors need no copy to be sent, and rings of slots.

A block is an anonymous file, mapped by the process that made it and by those it is offered to over a channel. It has no
name, and vanishes with the last process that has it open or mapped, even after SIGKILL. The two processes agree by
messages who may read or write which part and when; see `Channel.lend`.
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

from orchestray.platform.comm.channel.base import ChannelMismatchError

SLOT_BYTES = 512 * 1024
NUM_SLOTS = 8
_ALIGNMENT = 64
"""Bytes of a cache line."""
_SEAL_FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE` of Linux (5.1), which `fcntl` does not define."""
_IS_THERE, _OF_A_FILE = np.uint64(0b11 << 62), np.uint64(1 << 61)
"""Bits of an entry of Linux' pagemap: present or swapped out; of a file or shared."""
Place = list[Any]
"""Place of a tensor in a block, as JSON: dtype, shape, owner (0: the sender), index of the block, first byte."""


def room_for(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a block from which each of these tensors can be taken once."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


class SharedBlock:
    """A shared memory of fixed size, initially zero. It lives as long as it, or a tensor in it, is referenced."""

    def __init__(self, memory_file: int) -> None:
        """Map an anonymous file, which the block owns from now on, even if this fails.

        Changes by the owner of a sealed file are visible here, except in pages that this process has written to. Such
        pages become private copies that no other process sees.
        """
        self.file = memory_file
        self.num_bytes = os.fstat(memory_file).st_size
        self._is_private = bool(fcntl.fcntl(memory_file, fcntl.F_GET_SEALS) & _SEAL_FUTURE_WRITE)
        # A private mapping is not populated: that would copy each of its pages.
        flags = mmap.MAP_PRIVATE if self._is_private else mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(memory_file, self.num_bytes, flags=flags)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._taken = 0

    @classmethod
    def create(cls, num_bytes: int, *, is_mine: bool = False) -> Self:
        """Return new shared memory (Linux only).

        Args:
            num_bytes: size of the block.
            is_mine: True to keep other processes from changing it, whatever they try.
        """
        memory_file = os.memfd_create("orchestray-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory_file, max(1, num_bytes))
        except BaseException:
            os.close(memory_file)
            raise
        # Not closed again after an error here: by then its number may belong to another file.
        block = cls(memory_file)
        if is_mine:
            with suppress(OSError):  # an older kernel: other processes are trusted
                fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        return block

    def take(self, like: Tensor) -> Tensor:
        """Return the next part as a contiguous tensor of this dtype and shape; raise ValueError if it does not fit."""
        num_bytes = like.numel() * like.element_size()
        if self._taken + num_bytes > self.num_bytes:
            raise ValueError(f"a block of {self.num_bytes} bytes has {self.num_bytes - self._taken} left")
        taken = self.at(self._taken, like.dtype, tuple(like.shape))
        self._taken += _padded(num_bytes)
        return taken

    def at(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor that starts at this byte; raise ChannelMismatchError if it is not within the block."""
        count = torch.Size(shape).numel()
        if start < 0 or start % dtype.itemsize or start + count * dtype.itemsize > self.num_bytes:
            raise ChannelMismatchError(
                f"a tensor {dtype} {list(shape)} from byte {start} on is not within {self.num_bytes}"
            )
        if not count:  # torch.frombuffer accepts no empty buffers
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def find(self, tensor: Tensor) -> int | None:
        """Return the first byte of a contiguous tensor within the block; None if it is outside or has gaps."""
        start = tensor.data_ptr() - self._start
        num_bytes = tensor.numel() * tensor.element_size()
        is_within = start >= 0 and start + num_bytes <= self.num_bytes
        return start if is_within and tensor.device.type == "cpu" and tensor.is_contiguous() else None

    def see_anew(self) -> None:
        """Drop pages that were written to here, so that the whole block shows the owner's content again."""
        if self._is_private and _has_own_pages(self._start, self.num_bytes):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file, so that it cannot be offered again; may be called twice. Tensors in the block stay valid."""
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self.close()


class Ring:
    """A ring of slots in a memory file, filled and emptied in turn. The file may be closed once it is mapped."""

    def __init__(self, memory_file: int) -> None:
        self._map = mmap.mmap(memory_file, SLOT_BYTES * NUM_SLOTS)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._next = 0

    def next_slot(self) -> int:
        """Return the address of the next slot in turn."""
        address = self._start + self._next * SLOT_BYTES
        self._next = (self._next + 1) % NUM_SLOTS
        return address

    def close(self) -> None:
        """Unmap the memory: no slot may be used any more."""
        self._map.close()


def _has_own_pages(start: int, num_bytes: int) -> bool:
    """Return True if some pages of this range are private copies of this process, not those of the mapped file."""
    first, end = start // mmap.PAGESIZE, -(-(start + num_bytes) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - pathlib's would be buffered
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * (end - first), 8 * first), dtype="<u8")
    except OSError:
        return True  # unknown: drop them to be safe
    return bool(((entries & _IS_THERE != 0) & (entries & _OF_A_FILE == 0)).any())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

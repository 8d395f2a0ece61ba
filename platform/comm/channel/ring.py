"""The memory that a shared memory channel sends through."""

from __future__ import annotations

import ctypes
import mmap

import torch

SLOT_BYTES = 512 * 1024
NUM_SLOTS = 8


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


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes without the interpreter's lock and without torch's thread pool, of which each lane would start one."""
    ctypes.memmove(target, source, num_bytes)

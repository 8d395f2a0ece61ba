"""The memory that a process has needed."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes of this process: what the allocator held on a GPU, the resident set otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

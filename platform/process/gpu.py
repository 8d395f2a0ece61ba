"""The GPU of a process. torch is imported only by those that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def current_gpu() -> torch.device:
    """Return the current GPU of the calling thread, with its index.

    A device without an index is the current one of the thread that uses it: each thread has its own, GPU 0 at first.

    Raises:
        RuntimeError: this process sees no GPU.
    """
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def gpus_touched() -> bool:
    """Return True if this process has used CUDA. Asking does not start it, as counting the GPUs may."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

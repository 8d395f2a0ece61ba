"""The use of GPUs by this process."""

from __future__ import annotations


def gpus_touched() -> bool:
    """Return True if this process has used CUDA. Asking does not start it, as counting the GPUs may."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

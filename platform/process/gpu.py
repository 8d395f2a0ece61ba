"""The use of GPUs by this process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def gpus_touched() -> bool:
    """Return True if this process has used CUDA. Asking does not start it, as counting the GPUs may."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Gpu:
    """A GPU as it is measured while it computes."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: the GPU, with its index.
        """
        self.device = device

    @property
    def name(self) -> str:
        """Name of the model, such as "NVIDIA H100 80GB HBM3"."""
        import torch

        return torch.cuda.get_device_name(self.device)

    def peak_memory_bytes(self) -> int:
        """Return the peak of this process's allocations since it started, in bytes."""
        import torch

        return int(torch.cuda.max_memory_allocated(self.device))

    def utilization(self) -> float | None:
        """Return the part of the last moments in which the GPU computed, 0 to 1; None where NVML does not say.

        It is not installed, or has no such number for the device, as for a part of a GPU (MIG). Its errors are of
        classes that exist only where it is installed.
        """
        import torch

        with contextlib.suppress(Exception):
            return float(torch.cuda.utilization(self.device)) / 100.0
        return None

    def mark(self) -> Any:
        """Return an event of the calling thread's current stream, after all that it has been given so far."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, first: Any, second: Any) -> float | None:
        """Return the seconds between two marks; None if the GPU has not come to the second one yet."""
        return float(first.elapsed_time(second)) / 1e3 if second.query() else None

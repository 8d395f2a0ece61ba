"""How much memory the process of a trial may come to hold."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from orchestray.platform.errors import TrainingError


@contextlib.contextmanager
def limited_memory(limit_mb: float | None) -> Iterator[None]:
    """Within it this process cannot come to hold more than so much: an allocation beyond fails, and nothing else.

    Raises:
        TrainingError: it holds more before it begins.
    """
    if limit_mb is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resident, data = status_bytes("VmRSS"), status_bytes("VmData")
    if resident > limit_mb * 2**20:
        raise TrainingError(
            f"search.budget.trial_memory_mb is {limit_mb:g}, and the process of a trial holds "
            f"{resident / 2**20:.0f} MB before the trial begins."
        )
    # The kernel's limit counts what is reserved, not what is used: it may grow by what is left.
    most = data + int(limit_mb * 2**20) - resident
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def status_bytes(name: str) -> int:
    """What the kernel says of this process: `VmRSS`, memory in use; `VmData`, what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0

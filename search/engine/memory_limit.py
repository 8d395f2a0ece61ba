"""The memory limit of a trial's process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from orchestray.platform.errors import TrainingError


@contextlib.contextmanager
def limited_memory(limit_mb: float | None) -> Iterator[None]:
    """Limit the memory of this process within the context: larger allocations fail, without other effects.

    Raises:
        TrainingError: the process already holds more before it begins.
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
    # The kernel limits reserved rather than used memory: allow growth by what is left.
    most = data + int(limit_mb * 2**20) - resident
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def status_bytes(name: str) -> int:
    """Return a value of this process's status: `VmRSS`, memory in use; `VmData`, the memory that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0

"""Devices for remote direct memory access, which nothing here sends over."""

from __future__ import annotations

from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")
"""Folder in which Linux has an entry for each, InfiniBand or RoCE."""


def rdma_devices(folder: Path = _DEVICES) -> list[str]:
    """Return the names of this machine's devices; none where the system has no such folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

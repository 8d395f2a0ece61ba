"""The machine and the versions that numbers depend on, without names of hosts or users."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = ("orchestray", "ray", "torch", "numpy", "pyarrow", "safetensors")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def description() -> dict[str, Any]:
    """Describe what the numbers depend on, with nothing that names the machine."""
    import psutil

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "processor": model,
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found["commit"] = _git("rev-parse", "--short", "HEAD")
        # Results of earlier benchmarks do not change what this one measures.
        if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"):
            found["commit"] += " and uncommitted changes"
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`."""
    import psutil

    best, kind = "", "unknown"
    for partition in psutil.disk_partitions(all=True):
        if path.is_relative_to(partition.mountpoint) and len(partition.mountpoint) > len(best):
            best, kind = partition.mountpoint, partition.fstype
    return kind

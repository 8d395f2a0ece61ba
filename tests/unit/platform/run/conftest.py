from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mount_small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Yield a function that mounts a real, tiny file system.

    It is called as `mount_small_disk("2m")`, or with further options (`"ro"`).
    """
    mounted: list[Path] = []

    def mount(size: str, *options: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        settings = ",".join([f"size={size}", *options])
        outcome = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", settings, "tmpfs", str(path)], capture_output=True, text=True, check=False
        )
        if outcome.returncode != 0:
            pytest.skip(f"no permission to mount a small disk here: {outcome.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)

"""The working directory of a process, which can be deleted under it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from orchestray.platform import collecting


def import_torch() -> None:
    """Import torch where no deletion of the working directory can hurt.

    The oneMKL inside torch asks for the working directory when it is loaded, and ends the process if there is none:
    "Intel oneMKL FATAL ERROR: Cannot load .../libtorch_cpu.so". Ray deletes that of a job and unpacks it anew when a
    second node on the same machine first needs it, and a worker stands where its node was started.
    """
    if "torch" in sys.modules:
        return
    with _standing_in("/"), collecting.pause():
        import torch  # noqa: F401


@contextlib.contextmanager
def _standing_in(directory: str) -> Iterator[None]:
    try:
        before: str | None = os.getcwd()  # noqa: PTH109 - the same text goes back into chdir
    except FileNotFoundError:
        before = None
    os.chdir(directory)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):  # deleted meanwhile: then any directory is better than none
                os.chdir(before)

"""The working directory of a process, which may be deleted while the process runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from orchestray.platform.process import gc_control


def import_torch() -> None:
    """Import torch in a directory that cannot be deleted.

    The oneMKL inside torch reads the working directory when it is loaded. If it does not exist, oneMKL ends the
    process: "Intel oneMKL FATAL ERROR: Cannot load .../libtorch_cpu.so". Ray deletes and unpacks a job's working
    directory again when a second node on the same machine first needs it. A worker's working directory is that of its
    node.
    """
    if "torch" in sys.modules:
        return
    with _standing_in("/"), gc_control.pause():
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
            with contextlib.suppress(OSError):  # deleted meanwhile: then any directory will do
                os.chdir(before)

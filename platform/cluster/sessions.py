"""The session folders of Rays of our own, which Ray leaves in the temporary folder when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import IO

_LOCK = "orchestray.lock"
"""File in a session folder of a Ray of our own, locked as long as the process that started it lives."""
KEPT = 3
"""Folders of ended sessions that are kept, for a look at their logs."""


def hold(session: Path) -> IO[str] | None:
    """Mark a session folder as one of our own that is in use, until the result is closed or this process ends.

    Returns:
        The locked file; None where it cannot be written: the folder then stays.
    """
    with contextlib.suppress(OSError):
        lock = (session / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock
    return None


def tidy(folder: Path, kept: int = KEPT) -> None:
    """Remove the folders of ended sessions of our own, all but the last.

    Folders in use, and those that others started, stay.

    Args:
        folder: the temporary folder of Ray, which holds the session folders.
        kept: number of folders that stay.
    """
    with contextlib.suppress(OSError):
        ended = sorted(lock.parent for lock in folder.glob(f"session_*/{_LOCK}") if not _is_held(lock))
        for session in ended[: max(0, len(ended) - kept)]:
            shutil.rmtree(session, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    """Return True if a process holds the lock, or if that cannot be found out."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False

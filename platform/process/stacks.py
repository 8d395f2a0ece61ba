"""The Python stacks of a process of this machine, read by py-spy without its help: it may be stopped, or stuck."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

_NUM_ATTEMPTS = 3
"""Attempts to read a process, which may run meanwhile: then what is read may not fit together."""
_READ_TIMEOUT_S = 10.0


def read_stacks(pid: int, *, kill: bool = False) -> str:
    """Return the stacks of all threads of a process of this machine, or a sentence that says why not.

    Args:
        pid: id of the process.
        kill: True to kill it after that, if it is a worker of Ray.
    """
    text = _dumped(pid)
    if kill:
        with contextlib.suppress(OSError):  # it has ended, or is not to be seen from here
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)
    return text


def _dumped(pid: int) -> str:
    """Return what py-spy says. The process is not paused for it: one that is stopped already could not be."""
    command = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if command is None:
        return "The stacks could not be read: py-spy, which comes with ray[default], is not installed here.\n"
    reason = ""
    for _ in range(_NUM_ATTEMPTS):
        try:
            done = subprocess.run(
                [command, "dump", "--nonblocking", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=_READ_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"The stacks could not be read: {error}\n"
        if done.returncode == 0:
            return done.stdout
        reason = done.stderr.strip()
    return f"The stacks could not be read: py-spy says\n{reason}\n"

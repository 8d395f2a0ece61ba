"""The output of a process of Ray: the file into which it goes, and the lines in it that are the user's.

All of it ends in the file descriptors 1 and 2: prints, logs, warnings, native crashes, and that of child processes. Ray
leads them to files of the process. Reading those costs the process nothing, and they are still there when it has died.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_STDOUT, _STDERR = 1, 2
_MOST_BYTES = 4 * 2**20
_LONGEST_LINE = 100_000
"""Characters after which a line without an end is taken for one."""
_OF_RAY = re.compile(r"^:(job_id|actor_name|task_name|kwargs):")
_OF_LIBRARIES = re.compile(
    r"^(\[rank\d+\]:)?\[[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ |^\[Gloo\] |^\[\d{4}-\d\d-\d\d [\d:,]+ [EWI] \d+ \d+\]"
)
"""Beginnings of lines that torch's and Ray's C++ code writes: reports on connections, which do not concern the task."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
"""Escape sequences of terminals, and control characters other than the tabulator."""


def join_output() -> str:
    """Lead this process's stderr into the file of its stdout, so that the order of the lines is kept.

    Returns:
        The path of that file; empty if this is not a process of Ray whose output goes to a file.
    """
    try:
        path = os.readlink(f"/proc/self/fd/{_STDOUT}")  # noqa: PTH115 - the text, as it is
    except OSError:
        return ""
    if not (Path(path).name.startswith("worker-") and path.endswith(".out")):
        return ""
    os.dup2(_STDOUT, _STDERR)
    return path


def read_output(path: str, offset: int) -> bytes:
    """Return what a file has from an offset on, up to 4 MB; nothing if it cannot be read."""
    try:
        if os.stat(path).st_size <= offset:  # noqa: PTH116 - twice a second for each process
            return b""
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(offset)
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def size_of(path: str) -> int:
    """Return the size of a file in bytes; 0 if it cannot be read."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


class Lines:
    """The lines of a stream of bytes, as they become complete, without those that Ray writes for itself."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, more: bytes) -> list[str]:
        """Return the lines that are complete with these bytes."""
        *lines, self._rest = (self._rest + more).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        return [text for line in lines if not _OF_RAY.match(text := _text_of(line))]

    def end(self) -> list[str]:
        """Return the last line, if it has no end."""
        return self.feed(b"\n") if self._rest else []


def _text_of(line: bytes) -> str:
    """Return a line as a terminal would leave it: a progress bar that goes back to the margin overwrites itself."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return _CONTROL.sub("", text.rpartition("\r")[2])


def is_of_the_task(line: str) -> bool:
    """Return True if a line may be the user's: it is not a report of torch's or Ray's C++ code."""
    return not _OF_LIBRARIES.match(line)

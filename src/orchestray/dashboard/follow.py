"""Readers of growing files: only the new lines of a log, and a small file only when it has changed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass
class Fresh:
    """The new lines of a log."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    is_reset: bool = False
    """True if the log was rewritten (a run went back to a checkpoint) or is gone: all lines read before are void."""


class LogFollower:
    """A file of JSON lines, read from the place where the last reading ended.

    A last line without a line break is not read yet: it is still being written. A complete line that is not a JSON
    object is counted and skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_broken = 0
        """Number of lines that are not JSON objects."""
        self._offset = 0
        self._inode: int | None = None

    def read(self) -> Fresh:
        """Return the lines since the last call."""
        fresh = Fresh()
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._inode is not None and (status.st_ino != self._inode or status.st_size < self._offset):
                    fresh.is_reset = self._forget()
                self._inode = status.st_ino
                if status.st_size > self._offset:
                    self._take(file.fileno(), status.st_size, fresh)
        except OSError:
            if self._inode is not None:
                fresh.is_reset = self._forget()
        return fresh

    def rewind(self) -> None:
        """Start from the beginning at the next reading."""
        self._forget()

    def _forget(self) -> bool:
        had_lines = self._offset > 0
        self._offset, self._inode, self.num_broken = 0, None, 0
        return had_lines

    def _take(self, descriptor: int, end: int, fresh: Fresh) -> None:
        rest = b""
        place = self._offset
        while place < end and (data := os.pread(descriptor, min(_CHUNK_BYTES, end - place), place)):
            place += len(data)
            whole, line_break, rest = (rest + data).rpartition(b"\n")
            self._offset += len(whole) + len(line_break)
            for raw in whole.split(b"\n") if line_break else ():
                self._parse(raw, fresh.lines)

    def _parse(self, raw: bytes, lines: list[dict[str, Any]]) -> None:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if isinstance(value, dict):
            lines.append(value)
        else:
            self.num_broken += 1


class SmallFile:
    """A file that is always written as a whole: its text, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text: str | None = None
        """Text of the file; None if the file does not exist."""
        self.problem: str | None = None
        """Reason why it could not be read although it exists."""
        self._signature: object = ()

    def read(self) -> bool:
        """Read the file if it has changed; return True if it had."""
        signature = signature_of(self.path)
        if signature == self._signature:
            return False
        self._signature, self.text, self.problem = signature, None, None
        if signature is not None:
            try:
                self.text = self.path.read_text(encoding="utf-8")
            except FileNotFoundError:
                pass
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                self.problem = f"{self.path.name} cannot be read: {reason}"
        return True


class JsonFile:
    """A JSON file that is always written as a whole."""

    def __init__(self, path: Path) -> None:
        self._file = SmallFile(path)
        self.value: Any = None
        """Content of the file; None if it does not exist or is damaged."""
        self.problem: str | None = None

    def read(self) -> bool:
        """Read the file if it has changed; return True if it had."""
        if not self._file.read():
            return False
        self.value, self.problem = None, self._file.problem
        if self._file.text is not None:
            try:
                self.value = json.loads(self._file.text)
            except ValueError:
                self.problem = f"{self._file.path.name} is half-written or damaged: it is no JSON"
        return True


def signature_of(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file does; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns

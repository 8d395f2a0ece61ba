"""The output of trials: each one's log in `logs/` of the search, written by the trials' processes, and the terminal."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestray.platform.process.output import Lines, read_output, size_of
from orchestray.trainers.driver.runlog.output_log import MOST_BYTES, Shower

if TYPE_CHECKING:
    from collections.abc import Callable

_STDOUT, _STDERR = 1, 2
_LOOK_S = 1.0


class TrialOutput:
    """The output of a trial's process: of each trial in turn into its own file, also what a crash leaves there."""

    def __init__(self, directory: str) -> None:
        """
        Args:
            directory: directory of the logs; empty: the output stays where it is.
        """
        self._directory = Path(directory) if directory else None
        self._path: Path | None = None

    def begin(self, trial: int) -> None:
        """Lead the output of this process into the log of a trial."""
        if self._directory is None:
            return
        path = self._directory / f"trial-{trial}.log"
        is_full = size_of(str(path)) > MOST_BYTES
        if path == self._path and not is_full:
            return
        with contextlib.suppress(OSError):  # a full disk, or one that other machines do not share: it trains on
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lead_into(Path(os.devnull) if is_full else path)

    def end(self) -> None:
        """Drop the output from now on."""
        if self._directory is not None:
            self._lead_into(Path(os.devnull))

    def _lead_into(self, path: Path) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, _STDOUT)
        os.dup2(file, _STDERR)
        os.close(file)
        self._path = path


class TrialLogs:
    """The logs of a search's trials as they grow, shown on the terminal."""

    def __init__(self, directory: Path, show: Callable[[str, list[str]], None]) -> None:
        """
        Args:
            directory: directory of the logs.
            show: shows lines, by the name of the trial that has printed them.
        """
        self._directory = directory
        self._shower = Shower(show)
        self._offsets = {file.name: size_of(file.path) for file in self._files()}
        """Size up to which each file was read; what an earlier attempt has left is not shown again."""
        self._lines: dict[str, Lines] = {}
        self._looked_s = 0.0

    def look(self) -> None:
        """Show what is new, about once a second."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            self._read()

    def close(self) -> None:
        """Show the rest, and remove logs with nothing in them."""
        self._read()
        for name, lines in self._lines.items():
            self._shower.lines(_name_of(name), lines.end())
        self._shower.say_hidden()
        for file in self._files():
            if size_of(file.path) == 0:
                Path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has logs, or is not there
            self._directory.rmdir()

    def _read(self) -> None:
        for file in self._files():
            offset = self._offsets.get(file.name, 0)
            if more := read_output(file.path, offset):
                self._offsets[file.name] = offset + len(more)
                lines = self._lines.setdefault(file.name, Lines()).feed(more)
                self._shower.lines(_name_of(file.name), lines)

    def _files(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._directory) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError:
            return []


def _name_of(file: str) -> str:
    return file.removesuffix(".log").replace("-", " ")

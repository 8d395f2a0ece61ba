"""The common part of reading the directories of runs and of searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.run.directory import RunPaths, is_live, read_result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Recorded:
    """A directory that one process writes, opened for reading: finished, running, or cut short."""

    def __init__(self, path: Path) -> None:
        """Open a directory.

        Args:
            path: absolute path of a directory with records.
        """
        self._path = path

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' {self.status} in {self.path}>"

    @property
    def path(self) -> Path:
        """Path of the directory."""
        return self._path

    @property
    def name(self) -> str:
        """Name of the run or search."""
        return self._path.name

    @property
    def status(self) -> str:
        """Status `succeeded`, `failed`, `interrupted`; without a result `running`, or `died` if nothing writes it."""
        return read_status(self._path)

    @property
    def result(self) -> dict[str, Any]:
        """Content of `result.json`; empty while there is none."""
        return read_result(RunPaths(self._path)) or {}


def read_status(path: Path) -> str:
    """Return the status of a directory, as in `Recorded.status`.

    Raises:
        StorageError: `result.json` is damaged.
    """
    live = is_live(path)  # first: a run that ends between the two checks has its result by the second
    return status_from(read_result(RunPaths(path)), live=live)


def status_from(result: Mapping[str, Any] | None, *, live: bool) -> str:
    """Return the status given by a result; without one, by whether a process writes the directory."""
    if result:
        return str(result.get("status"))
    return "running" if live else "died"

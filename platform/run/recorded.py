"""What the directories of runs and of searches have in common for who reads them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.run.directory import RunPaths, is_live, read_result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Recorded:
    """A directory that one process writes, read: finished, under way, or cut short."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: absolute; something was recorded there.
        """
        self._path = path

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' {self.status} in {self.path}>"

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def name(self) -> str:
        """The name of the run or search."""
        return self._path.name

    @property
    def status(self) -> str:
        """`succeeded`, `failed`, `interrupted`; without a result `running`, or `died` if no process writes it."""
        return read_status(self._path)

    @property
    def result(self) -> dict[str, Any]:
        """`result.json`; empty while there is none."""
        return read_result(RunPaths(self._path)) or {}


def read_status(path: Path) -> str:
    """As `Recorded.status`.

    Raises:
        StorageError: `result.json` is damaged.
    """
    live = is_live(path)  # first: what ends between the two looks has its result by the second
    return status_from(read_result(RunPaths(path)), live=live)


def status_from(result: Mapping[str, Any] | None, *, live: bool) -> str:
    """What a result says; without one, what follows from whether a process writes the directory."""
    if result:
        return str(result.get("status"))
    return "running" if live else "died"

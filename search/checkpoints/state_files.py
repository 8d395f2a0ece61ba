"""Files with the states of trials, from which a trial continues, and which other trials take over.

The module does not import torch, since the driver of a search does not need it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestray.platform.errors import CheckpointError, TrainingError
from orchestray.platform.run.files import dump_json, remove_tree, storage_errors, sync_directory, write_atomic

if TYPE_CHECKING:
    from orchestray.search.trials.program import TrialState

KEPT = "kept"
"""Key of a state's position under which its process adds what the next report must include: `report` (its number),
`evaluations` so far, `used_s`, and `copied_bytes` if it has taken over the state of another trial since the last one.
"""
_POSITION = "position"
"""Key of the metadata of a file."""


class StateLostError(TrainingError):
    """A trial's state whose only file is missing or damaged."""


class StateAt(NamedTuple):
    """The name of a state.

    The states of a trial are identified by the number of the report they were made for. This number only grows,
    whereas the step may fall when a trial takes over the state of another.
    """

    trial: int
    report: int
    """Number of the report, from 1."""
    is_on_the_way: bool = False
    """True for a state between the report before that one and that one. A trial has one such file at most."""


class StateFiles:
    """The states of a search, one file each."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def path(self, at: StateAt) -> Path:
        """Return the path of the file of a state."""
        name = "on-the-way" if at.is_on_the_way else f"report-{at.report:08d}"
        return self._directory / f"trial-{at.trial:05d}-{name}.safetensors"

    def reports(self) -> dict[int, set[int]]:
        """Return the reports of whose states there are files, by trial."""
        found: dict[int, set[int]] = {}
        for path in self._directory.glob("trial-*-report-*.safetensors"):
            _, trial, _, report = path.stem.split("-")
            found.setdefault(int(trial), set()).add(int(report))
        return found

    def write(self, at: StateAt, state: TrialState, *, is_secure: bool = False) -> None:
        """Write a state atomically: a process that is killed at any time leaves the whole file or none.

        A power failure may damage the file unless `is_secure`, which waits until the data is on the disk.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        with storage_errors(f"write {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
        write_state(self.path(at), state, is_secure=is_secure)

    def read(self, at: StateAt) -> TrialState:
        """Read a state.

        Raises:
            StorageError: it cannot be read.
            StateLostError: its file is missing, or damaged, for example by a power failure.
        """
        path = self.path(at)
        if not path.exists():
            raise StateLostError(f"The state of trial {at.trial} at its report {at.report} is lost: {path} is gone.")
        try:
            return read_state(path)
        except CheckpointError as error:
            raise StateLostError(f"The state in {path} is lost: the file is damaged ({error}).") from error

    def on_the_way(self, trial: int) -> StateAt | None:
        """Return the state on the way to a report of a trial; None if there is no whole file of one."""
        position = _position(self.path(StateAt(trial, 0, is_on_the_way=True)))
        return None if position is None else StateAt(trial, int(position[KEPT]["report"]), is_on_the_way=True)

    def is_whole(self, at: StateAt) -> bool:
        """Return True if the file of a state exists and has the length its header states; the values are not read."""
        return _position(self.path(at)) is not None

    def secure(self, at: StateAt) -> None:
        """Make a state survive a power failure, too.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        path = self.path(at)
        if not path.exists():
            return  # reading it raises the error
        with storage_errors(f"write {path}"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(path.parent)

    def remove(self, at: StateAt) -> None:
        """Remove the file of a state, if there is one."""
        self.path(at).unlink(missing_ok=True)

    def clear(self, keep: Collection[StateAt] = ()) -> None:
        """Remove everything but the files of some states."""
        kept = [path for at in keep if (path := self.path(at)).exists()]
        if not kept:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        for path in self._directory.iterdir():
            if path not in kept:
                remove_tree(path)

    def remove_remains(self) -> None:
        """Remove what killed processes left behind: half-written files and directories of gangs."""
        for path in self._directory.glob("*"):
            if not path.name.startswith("trial-"):
                remove_tree(path)


def write_state(path: Path, state: TrialState, *, is_secure: bool = False) -> None:
    """Write a state into a safetensors file, atomically.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    from orchestray.platform.run.tensor_file import pieces

    write_atomic(path, pieces(state.tensors, {_POSITION: dump_json(dict(state.position))}), sync=is_secure)


def read_state(path: Path) -> TrialState:
    """Read a state.

    Raises:
        CheckpointError: the file is damaged, or not of a state.
        StorageError: it cannot be read.
    """
    import numpy as np

    from orchestray.platform.run.tensor_file import unpack
    from orchestray.search.trials.program import TrialState

    with storage_errors(f"read {path}"):
        data = np.fromfile(path, dtype=np.uint8)
    tensors, position = unpack(data, str(path)), _position(path)
    if position is None:
        raise CheckpointError(f"{path} is damaged, or not the state of a trial")
    return TrialState(tensors, position)


def _position(path: Path) -> dict[str, Any] | None:
    """Return the position of the state in a file; None if there is none, or it lacks a part of its length."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            position: dict[str, Any] = json.loads(header.pop("__metadata__")[_POSITION])
            num_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            return position if os.fstat(file.fileno()).st_size == file.tell() + num_bytes else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None

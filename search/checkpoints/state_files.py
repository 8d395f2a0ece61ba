"""Files of trial states that outlive the process that made them, and the naming of states.

The states of a trial are identified by the number of the report they were made for. This number only grows, whereas the
step may fall when a trial takes over the state of another. The module does not import torch, since the driver of a
search does not need it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import CheckpointError, TrainingError
from orchestray.platform.run.files import dump_json, remove_tree, storage_errors, sync_directory, write_atomic

if TYPE_CHECKING:
    from orchestray.search.trials.program import TrialState

KEPT, ON_THE_WAY = "kept", "is_on_the_way"
"""Keys of a state's position: the first holds what its process adds to the program's values. Inside it, the second is
true if the report of the state is not due yet.
"""


class StateLostError(TrainingError):
    """A trial's state that no process holds any more, or whose only file is damaged."""


@dataclass(frozen=True)
class StatePlace:
    """The location of a state, as reported by the process that holds it. JSON values."""

    trial: int
    report: int
    """Number of the report of the trial for which the state was made, from 1."""
    host: str = ""
    """Host of the process that holds the state in memory; empty if only the file has it."""
    port: int = 0
    vault: str = ""
    """Name of the state store in that process, which tells apart stores that used the same address one after the other.
    """
    is_best: bool = False
    """True if this means the file that is kept because it may hold the best state of all."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StatePlace:
        return cls(**data)


class StateFiles:
    """The states of a search that outlive the process that made them, one file each.

    A trial resumes from `trial-00003-report-00000002` (or another trial takes it over); `best-...` is kept because it
    may be the best state of all.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def path(self, trial: int, report: int, *, is_best: bool = False) -> Path:
        """Return the path of the file of a state."""
        return self._directory / f"{'best' if is_best else 'trial'}-{trial:05d}-report-{report:08d}.safetensors"

    def reports(self, trial: int) -> list[int]:
        """Return the reports from whose states a trial can resume, in order."""
        return self._reports(f"trial-{trial:05d}")

    def best_reports(self, trial: int) -> list[int]:
        """Return the reports at which a trial was among the best, in order."""
        return self._reports(f"best-{trial:05d}")

    def _reports(self, stem: str) -> list[int]:
        found = self._directory.glob(f"{stem}-report-*.safetensors")
        return sorted(int(path.stem.rpartition("-")[2]) for path in found)

    def write(
        self, trial: int, report: int, state: TrialState, *, is_best: bool = False, is_secure: bool = False
    ) -> None:
        """Write a state atomically: a process that is killed at any time leaves the whole file or none.

        A power failure may damage the file unless `is_secure`, which waits until the data is on the disk.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        from orchestray.platform.run.tensor_file import pack

        path = self.path(trial, report, is_best=is_best)
        position = dump_json(dict(state.position)).encode()
        data = len(position).to_bytes(8, "little") + position + pack(state.tensors)
        with storage_errors(f"write {path}"):
            self._directory.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data, sync=is_secure)

    def read(self, trial: int, report: int, *, is_best: bool = False) -> TrialState:
        """Read a state that was written.

        Raises:
            StorageError: it cannot be read.
            StateLostError: it is damaged, for example by a power failure.
        """
        import numpy as np

        from orchestray.platform.run.tensor_file import unpack
        from orchestray.search.trials.program import TrialState

        path = self.path(trial, report, is_best=is_best)
        with storage_errors(f"read {path}"):
            data = np.fromfile(path, dtype=np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        try:
            position = json.loads(data[8 : 8 + length].tobytes())
            tensors = unpack(data[8 + length :].copy(), str(path))
        except (ValueError, CheckpointError) as error:
            raise StateLostError(f"The state in {path} is lost: the file is damaged ({error}).") from error
        return TrialState(tensors, position)

    def is_on_the_way(self, trial: int, report: int) -> bool:
        """Return True if the file of a state is complete and the state was made before its report was reached."""
        position = self._position(trial, report)
        return position is not None and bool(position.get(KEPT, {}).get(ON_THE_WAY))

    def is_whole(self, trial: int, report: int, *, is_best: bool = False) -> bool:
        """Return True if the file of a state exists and has the length its header states; the values are not read."""
        return self._position(trial, report, is_best=is_best) is not None

    def _position(self, trial: int, report: int, *, is_best: bool = False) -> dict[str, Any] | None:
        try:
            with self.path(trial, report, is_best=is_best).open("rb") as file:
                position: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                header.pop("__metadata__", None)
                num_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
                return position if os.fstat(file.fileno()).st_size == file.tell() + num_bytes else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def secure_best(self, trial: int, report: int) -> None:
        """Make a state among the best survive a power failure, too.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        path = self.path(trial, report, is_best=True)
        if not path.exists():
            return  # reading it raises the error
        with storage_errors(f"write {path}"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(path.parent)

    def remove(self, trial: int, *, before: int | None = None, but: Collection[int] = ()) -> None:
        """Remove the files a trial could resume from: of all reports or of those before `before`, except `but`."""
        for report in self.reports(trial):
            if (before is None or report < before) and report not in but:
                self.path(trial, report).unlink(missing_ok=True)

    def remove_best(self, trial: int, report: int) -> None:
        """Remove the file of a state that is not among the best any more."""
        self.path(trial, report, is_best=True).unlink(missing_ok=True)

    def clear(self, *, keep: tuple[int, int] | None = None, parents: Collection[tuple[int, int]] = ()) -> None:
        """Remove everything that a later continuation of the search does not need.

        Args:
            keep: (trial, report) of the best state, whose file stays.
            parents: (trial, report) of states that later trials may take over.
        """
        kept = [] if keep is None else [self.path(*keep, is_best=True)]
        kept = [path for path in [*kept, *(self.path(*parent) for parent in parents)] if path.exists()]
        if not kept:
            shutil.rmtree(self._directory, ignore_errors=True)
            return
        for path in self._directory.iterdir():
            if path not in kept:
                remove_tree(path)

    def remove_remains(self) -> None:
        """Remove what killed processes left behind: half-written files and directories of gangs."""
        for path in self._directory.glob("*"):
            if not path.name.startswith(("trial-", "best-")):
                remove_tree(path)

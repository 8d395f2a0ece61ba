"""Where the states of trials lie that survive the process that made them, and how a state is named.

States of a trial are told apart by the number of the report that they were made for, which only grows: its step may
fall when it takes the state of another. Imports no torch: the driver of a search has no need of it.
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
"""Where in the position of a state its process keeps what is not the program's, and whether its report is due yet."""


class StateLostError(TrainingError):
    """Nobody has a state any more, or its only file is damaged."""


@dataclass(frozen=True)
class StatePlace:
    """Where a state can be had: what a process tells of one it holds. JSON values."""

    trial: int
    report: int
    """The how-manieth report of the trial it was made for, from 1."""
    host: str = ""
    """Of the vault that holds it in memory; empty: only the file has it."""
    port: int = 0
    vault: str = ""
    """Tells vaults apart that had the same address one after the other."""
    is_best: bool = False
    """Whether the file is meant that is kept because it may be the best of all."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StatePlace:
        return cls(**data)


class StateFiles:
    """The states of a search that survive the process that made them, each a file.

    `trial-00003-report-00000002` is there for the trial to go on from (or for another to take), `best-...` because it
    may be the best of all.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def path(self, trial: int, report: int, *, is_best: bool = False) -> Path:
        """The file of a state."""
        return self._directory / f"{'best' if is_best else 'trial'}-{trial:05d}-report-{report:08d}.safetensors"

    def reports(self, trial: int) -> list[int]:
        """The reports from whose states a trial can go on, in order."""
        return self._reports(f"trial-{trial:05d}")

    def best_reports(self, trial: int) -> list[int]:
        """The reports at which a trial was among the best, in order."""
        return self._reports(f"best-{trial:05d}")

    def _reports(self, stem: str) -> list[int]:
        found = self._directory.glob(f"{stem}-report-*.safetensors")
        return sorted(int(path.stem.rpartition("-")[2]) for path in found)

    def write(
        self, trial: int, report: int, state: TrialState, *, is_best: bool = False, is_secure: bool = False
    ) -> None:
        """Write a state, whole or not at all, whatever process is killed when.

        What is not `is_secure` may be damaged by a loss of power; what is takes the time of the disk.

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
        """A state that was written.

        Raises:
            StorageError: it cannot be read.
            StateLostError: it is damaged, as a loss of power leaves a file.
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
        """Whether a state's file is there, whole, and of before that report was come to."""
        position = self._position(trial, report)
        return position is not None and bool(position.get(KEPT, {}).get(ON_THE_WAY))

    def is_whole(self, trial: int, report: int, *, is_best: bool = False) -> bool:
        """Whether a state's file is there and as long as it says; its values are not looked at."""
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
        """Have a state among the best survive a loss of power, too.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        path = self.path(trial, report, is_best=True)
        if not path.exists():
            return  # who reads it says so
        with storage_errors(f"write {path}"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(path.parent)

    def remove(self, trial: int, *, before: int | None = None, but: Collection[int] = ()) -> None:
        """Remove the files a trial could go on from: those of earlier reports than `before`, or all; `but` some."""
        for report in self.reports(trial):
            if (before is None or report < before) and report not in but:
                self.path(trial, report).unlink(missing_ok=True)

    def remove_best(self, trial: int, report: int) -> None:
        """A state is among the best no longer."""
        self.path(trial, report, is_best=True).unlink(missing_ok=True)

    def clear(self, *, keep: tuple[int, int] | None = None, parents: Collection[tuple[int, int]] = ()) -> None:
        """Remove everything, but what a search that may be gone on with needs.

        Args:
            keep: (trial, report) of the best, whose file stays.
            parents: those of states that further trials may take.
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
        """Remove what processes that were killed have left: files half written, folders of gangs."""
        for path in self._directory.glob("*"):
            if not path.name.startswith(("trial-", "best-")):
                remove_tree(path)

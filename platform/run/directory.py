"""A run directory as seen by its only writer, the driver. Light: imports neither torch nor ray."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.errors import RunNameError, StorageError
from orchestray.platform.run.checkpoint_files import checkpoint_steps
from orchestray.platform.run.files import (
    dump_json,
    load_json,
    remove_stale_temporaries,
    remove_tree,
    storage_errors,
    sync_directory,
    temporary_sibling,
    write_atomic,
)
from orchestray.platform.run.metrics import EventLog, MetricsLog
from orchestray.platform.run.store import REPLACED, open_store
from orchestray.platform.run.tensorboard import TensorBoardLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestray.platform.run.store import Store


_REMOVE_IT = "it only says how the run ended: remove it, and --resume writes it again"
_KEPT = "run"
"""Folder beside checkpoints in a storage of their own, with what a resume needs where the run directory is gone."""


class RunPaths:
    """The paths of the files in a run directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.actors = self.path / "actors.json"
        self.result = self.path / "result.json"
        self.code = self.path / "code.json"
        self.timeline = self.path / "timeline.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / ".lock"
        self.requests = self.path / ".requests"
        self.stacks = self.path / "stacks"
        self.logs = self.path / "logs"

    def checkpoint_location(self, storage: str | None) -> str:
        """Return the place of the checkpoints: the run directory, or `<storage>/<name>`, as runs share a storage."""
        return str(self.checkpoints) if storage is None else f"{storage.rstrip('/')}/{self.path.name}"


def is_live(path: str | os.PathLike[str]) -> bool:
    """Return True if a process is writing the run at `path` now."""
    try:
        descriptor = os.open(RunPaths(path).lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def writer_of(path: str | os.PathLike[str]) -> int | None:
    """Return the id of the process of this machine that writes the run at `path`; None if it is not to be seen."""
    lock = str(RunPaths(path).lock.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        if lock in _open_files(process):
            return int(process.name)
    return None


def _open_files(process: Path) -> Iterator[str]:
    """Yield the files that a process has open; none if it has ended, or is not ours."""
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed by now
                yield os.readlink(link)  # noqa: PTH115 - the text, as it is


class RunDirectory:
    """The only writer of a run directory; a context manager that holds the run's lock.

    The lock is the kernel's (flock), so it is released when the process ends, in any way.
    """

    def __init__(self, paths: RunPaths, lock_descriptor: int, storage: str | None = None) -> None:
        self.paths = paths
        self.checkpoint_location = paths.checkpoint_location(storage)
        """Place of its checkpoints: a directory, or a URI of pyarrow.fs."""
        self._lock_descriptor = lock_descriptor

    @property
    def path(self) -> Path:
        """Path of the directory."""
        return self.paths.path

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.paths.path.name

    @classmethod
    def create(cls, runs_dir: str | os.PathLike[str], name: str, *, storage: str | None = None) -> Self:
        """Make `<runs_dir>/<name>` and lock it; `storage` is the config's `checkpoint.storage`.

        Raises:
            RunNameError: the name is in use, there or in the storage, or cannot name a directory.
            StorageError: the place is not writable, the disk is full, or the storage does not answer.
        """
        check_name(name)
        runs_path = Path(os.path.abspath(runs_dir))  # noqa: PTH100 - resolve() would follow the user's links
        paths = RunPaths(runs_path / name)
        if storage is not None:
            _check_unused(paths.checkpoint_location(storage), name)
        with storage_errors(f"create the run directory {paths.path}"):
            runs_path.mkdir(parents=True, exist_ok=True)
            try:
                paths.path.mkdir()
            except FileExistsError:
                raise _in_use(paths.path) from None
        return cls(paths, _lock(paths, name), storage)

    @classmethod
    @contextlib.contextmanager
    def create_whole(cls, runs_dir: str | os.PathLike[str], name: str) -> Iterator[Self]:
        """Make `<runs_dir>/<name>` from what the body writes, as a whole at its end; if the body raises, not at all.

        What a dead process left half-written there is removed.

        Raises:
            RunNameError: the name is in use, or cannot name a directory.
            StorageError: the place is not writable, or the disk is full.
        """
        check_name(name)
        path = Path(os.path.abspath(runs_dir)) / name  # noqa: PTH100
        temporary = temporary_sibling(path)
        with storage_errors(f"create the run directory {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(path.parent)
        _check_free(path)
        with storage_errors(f"create the run directory {path}"):
            temporary.mkdir()
        try:
            paths = RunPaths(temporary)
            with cls(paths, _lock(paths, name)) as run:
                yield run
            _check_free(path)
            with storage_errors(f"create the run directory {path}"):
                temporary.rename(path)
                sync_directory(path.parent)
        except BaseException:
            remove_tree(temporary)
            raise

    @classmethod
    def open_existing(cls, runs_dir: str | os.PathLike[str], name: str, *, storage: str | None = None) -> Self:
        """Lock the run `<runs_dir>/<name>` to continue it, and remove files that a dead process left half-written.

        A directory that is gone with its machine is made again from what `keep_elsewhere` has put into the storage.

        Raises:
            RunNameError: the run does not exist, or a process is still writing it.
            StorageError: the directory is not writable, or the storage does not answer.
        """
        check_name(name)
        paths = RunPaths(Path(os.path.abspath(runs_dir)) / name)  # noqa: PTH100
        if storage is None and not paths.path.is_dir():
            raise RunNameError(
                f"there is no run '{name}' in {paths.path.parent}, and no checkpoint.storage that may have it: "
                "give the --runs-dir that has it (`orchestray runs list` shows the runs), or leave out --resume"
            )
        is_gone = storage is not None and not paths.config.exists()
        location = paths.checkpoint_location(storage)
        kept = _kept_files(open_store(location), paths) if is_gone else {}
        if is_gone and not kept:
            _check_unused(location, name)
        with storage_errors(f"create the run directory {paths.path}"):
            paths.path.mkdir(parents=True, exist_ok=True)
        run = cls(paths, _lock(paths, name), storage)
        with storage_errors(f"clean up {paths.path}"):
            for directory in (paths.path, paths.checkpoints):
                remove_stale_temporaries(directory)
        for path, content in kept.items():
            write_atomic(path, content)
        return run

    def keep_elsewhere(self) -> None:
        """Put the run's config and code beside its checkpoints, where these have a storage of their own."""
        if self.checkpoint_location == str(self.paths.checkpoints):
            return
        store = open_store(self.checkpoint_location)
        files = {path: path.read_bytes() for path in (self.paths.code, self.paths.config)}
        if _kept_files(store, self.paths) == files:  # an object store has nothing while a folder is replaced
            return
        with store.create(_KEPT) as open_file:
            for path, content in files.items():  # the last one makes the folder valid
                with open_file(path.name) as write:
                    write(content)

    def write_config(self, yaml_text: str) -> None:
        """Write `config.yaml`."""
        write_atomic(self.paths.config, yaml_text.encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`."""
        write_atomic(self.paths.result, (dump_json(result, indent=2) + "\n").encode())

    def write_code(self, code: Mapping[str, Any]) -> None:
        """Write `code.json`: the user's files that the run imports, as they were when it began or last went on."""
        write_atomic(self.paths.code, (dump_json(code, indent=1) + "\n").encode())

    def write_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Write `timeline.json`: which worker computed which micro-batch and when, in the last steps."""
        write_atomic(self.paths.timeline, (dump_json(timeline) + "\n").encode())

    def write_actors(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Write `actors.json`: every live process (`role, rank, pid, node`)."""
        write_atomic(self.paths.actors, (dump_json(list(actors), indent=1) + "\n").encode())

    def read_result(self) -> dict[str, Any] | None:
        """Return `result.json`, or None while the run has none."""
        return read_result(self.paths)

    def remove_result(self) -> None:
        """Remove the result of a run that is continued."""
        with storage_errors(f"remove {self.paths.result}"):
            self.paths.result.unlink(missing_ok=True)

    def write_stacks(self, name: str, text: str) -> None:
        """Write the stacks of a process that was killed, as a file of this name in `stacks/`."""
        with storage_errors(f"write into {self.paths.stacks}"):
            self.paths.stacks.mkdir(exist_ok=True)
        write_atomic(self.paths.stacks / name, text.encode())

    def append_output(self, name: str, text: str) -> None:
        """Append what a process has printed to the file of this name in `logs/`."""
        with storage_errors(f"write into {self.paths.logs}"):
            self.paths.logs.mkdir(exist_ok=True)
            with (self.paths.logs / name).open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)

    def metrics_log(self) -> MetricsLog:
        """Open `metrics.jsonl` for appending."""
        return MetricsLog(self.paths.metrics)

    def event_log(self, clock: Callable[[], float]) -> EventLog:
        """Open `events.jsonl` for appending; `clock` returns seconds since the start of the run."""
        return EventLog(self.paths.events, clock)

    def tensorboard_log(self, started_s: Callable[[], float] | None = None) -> TensorBoardLog:
        """Return a TensorBoard log, whose file is created with the first line."""
        return TensorBoardLog(self.paths.tensorboard, started_s)

    def close(self) -> None:
        """Release the lock; may be called again."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_free(path: Path) -> None:
    if path.exists():
        raise _in_use(path)


def _in_use(path: Path) -> RunNameError:
    return RunNameError(
        f"run name '{path.name}' is in use ({path}): go on with that run by --resume, "
        "or choose another name with --name"
    )


def check_name(name: str) -> None:
    """Raise an error for a name that cannot name one directory.

    Raises:
        RunNameError: the name is empty, a path, hidden, or has characters that file names cannot have.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name.encode()) > 200:
        raise RunNameError(
            f"run name {name!r} cannot name a directory: wanted 1 to 200 bytes without '/', not beginning with '.'; "
            "choose another with --name"
        )


def read_config_text(paths: RunPaths) -> str:
    """Return the text of a run's `config.yaml`.

    Raises:
        StorageError: the file is missing or unreadable.
    """
    try:
        return paths.config.read_text()
    except FileNotFoundError:
        raise StorageError(
            f"{paths.path} has no config.yaml, so it is no run that can be read; remove it, or give another name"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"could not read {paths.config}: {error}") from error


def read_result(paths: RunPaths) -> dict[str, Any] | None:
    """Return a run's `result.json`, or None while it has none."""
    if not paths.result.exists():
        return None
    try:
        result = load_json(paths.result)
    except StorageError as error:
        if isinstance(error.__cause__, ValueError):
            raise StorageError(f"{error}; {_REMOVE_IT}") from error
        raise
    if not isinstance(result, dict):
        raise StorageError(f"could not read {paths.result}: it is not a JSON object; {_REMOVE_IT}")
    return result


def _check_unused(location: str, name: str) -> None:
    """Raise an error if the storage has checkpoints of this name: a new run must not use or remove another's."""
    if checkpoint_steps(open_store(location)):
        raise RunNameError(
            f"run name '{name}' is in use in checkpoint.storage: {location} holds checkpoints; "
            "remove them, or choose another name with --name"
        )


def _kept_files(store: Store, paths: RunPaths) -> dict[Path, bytes]:
    """Return what `keep_elsewhere` has put beside the checkpoints, by its path; empty if the run has never begun."""
    for folder in (_KEPT, _KEPT + REPLACED):
        if store.size(folder, paths.config.name) >= 0:
            found = {}
            for path in (paths.code, paths.config):
                with store.open_read(folder, path.name) as stream:
                    found[path] = bytes(stream.read())
            return found
    return {}


def _lock(paths: RunPaths, name: str) -> int:
    with storage_errors(f"write into the run directory {paths.path}"):
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    # More than one attempt: a reader that checks whether the run is alive holds the lock for an instant.
    if not any(_try_lock(descriptor, fcntl.LOCK_EX, wait_s) for wait_s in (0.0, 0.02, 0.1)):
        os.close(descriptor)
        raise RunNameError(
            f"run '{name}' ({paths.path}) is being written by another process: wait for its end, or stop it first"
        )
    return descriptor


def _try_lock(descriptor: int, kind: int, wait_s: float = 0.0) -> bool:
    time.sleep(wait_s)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks: no process can hold one
        return True
    return True

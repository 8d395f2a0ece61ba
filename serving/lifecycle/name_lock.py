"""The lookup of running endpoints: a small file among the runs, locked as long as the endpoint lives."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestray.platform.errors import RunNameError, StorageError

_FOLDER = ".endpoints"
START_PATIENCE_S = 10.0
"""Seconds in which an endpoint that answers by HTTP writes where changes go to."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class EndpointInfo:
    """The contents of the file of a running endpoint."""

    name: str
    pid: int
    url: str
    control_port: int = 0
    """Port on this machine for changes."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Secret that allows changes, known to those who can read the file: its owner."""


class EndpointState:
    """A lock on the name of an endpoint, which another process cannot take while this one lives.

    Args:
        runs_dir: directory of the runs.
        name: name of the endpoint.

    Raises:
        RunNameError: an endpoint of that name runs.
        StorageError: the directory cannot be written.
    """

    def __init__(self, runs_dir: str | os.PathLike[str], name: str) -> None:
        self._path = state_path(runs_dir, name)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = _locked(self._path)
            while file is None:
                file = _locked(self._path)
        except BlockingIOError:
            raise RunNameError(
                f"an endpoint named '{name}' runs already{_where(self._path)}: change it with --update, "
                "or give this one another --name"
            ) from None
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error
        self._file = file

    def write(self, standing: EndpointInfo) -> None:
        """Write the address of the endpoint, once it answers."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(standing)).encode(), 0)

    def close(self) -> None:
        """Release the name."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def find_endpoint(runs_dir: str | os.PathLike[str], name: str, *, patience_s: float = 0.0) -> EndpointInfo:
    """Return the running endpoint of that name.

    Args:
        runs_dir: directory of the runs.
        name: name of the endpoint.
        patience_s: seconds that an endpoint which is still starting has to become ready.

    Raises:
        RunNameError: there is none, or it is still starting.
    """
    path = state_path(runs_dir, name)
    until_s = time.monotonic() + patience_s
    while _is_locked(path):
        found = _read(path)
        if found is not None:
            return EndpointInfo(**found)
        if time.monotonic() >= until_s:
            raise RunNameError(f"the endpoint '{name}' is still starting: change it when it is ready")
        time.sleep(_LOOK_S)
    raise _none(runs_dir, name)


def state_path(runs_dir: str | os.PathLike[str], name: str) -> Path:
    """Return the file of an endpoint."""
    return Path(runs_dir).absolute() / _FOLDER / f"{name}.json"


def _locked(path: Path) -> int | None:
    """Return the file, open and locked; None: its holder has ended meanwhile, and has removed it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: it cannot be written.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the file of an endpoint; one that was killed leaves it unlocked."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _where(path: Path) -> str:
    found = _read(path)
    return "" if found is None else f" at {found.get('url')} (process {found.get('pid')})"


def _none(runs_dir: str | os.PathLike[str], name: str) -> RunNameError:
    return RunNameError(
        f"no endpoint named '{name}' runs from {Path(runs_dir).absolute()}: start it without --update; "
        "--name and --runs-dir say which one is meant"
    )

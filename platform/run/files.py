"""Files that are complete or absent: atomic writes, clean-up after dead processes, and disk errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.errors import StorageError

_TEMPORARY = ".tmp-"
_FOREIGN_AGE_S = 24 * 3600.0
_counter = itertools.count()


def storage_error(error: OSError, what: str) -> StorageError:
    """Return the error for `error`, which occurred while doing `what` (as in "write runs/a/config.yaml")."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return StorageError(
            f"could not {what}: {why}; free some space (or lower checkpoint.keep) and go on with --resume"
        )
    if what.startswith("read ") and error.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"could not {what}: no permission to read it; ask its owner for that")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"could not {what}: no permission to write there; choose another place with --runs-dir")
    return StorageError(f"could not {what}: {error.strerror or error}")


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the body into a StorageError that says why `what` failed."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what) from error


def temporary_sibling(path: Path) -> Path:
    """Return a temporary name beside `path`; it names the host and process, so that leftovers are recognised."""
    host = socket.gethostname().replace("-", "_")
    return path.with_name(f"{_TEMPORARY}{host}-{os.getpid()}-{next(_counter)}-{path.name}")


def is_temporary(name: str) -> bool:
    """Return True if `name` is one that `temporary_sibling` makes."""
    return name.startswith(_TEMPORARY)


def remove_stale_temporaries(directory: Path) -> list[str]:
    """Remove the temporaries in `directory` whose writers are dead; return their names.

    Those of another host are judged by age (a day), since its processes cannot be checked.
    """
    removed = []
    with contextlib.suppress(FileNotFoundError):
        for entry in list(directory.iterdir()):
            if is_temporary(entry.name) and _is_stale(entry):
                remove_tree(entry)
                removed.append(entry.name)
    return removed


def _is_stale(entry: Path) -> bool:
    host, _, rest = entry.name.removeprefix(_TEMPORARY).partition("-")
    pid_text = rest.partition("-")[0]
    if host == socket.gethostname().replace("-", "_") and pid_text.isdigit():
        return not _is_alive(int(pid_text))
    try:
        return time.time() - entry.stat().st_mtime > _FOREIGN_AGE_S
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie (killed, but not yet collected by its parent) does not write any more.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def remove_tree(path: Path) -> None:
    """Remove a file or a folder; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Write `data` to `path`: readers see the old content or the new, at whatever time a process dies.

    Args:
        path: path of the file.
        data: whole content of the file, or its pieces.
        sync: True to survive a power cut as well; False to survive only the death of processes.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    temporary = temporary_sibling(path)
    try:
        with storage_errors(f"write {path}"):
            with temporary.open("wb") as file:
                file.writelines((data,) if isinstance(data, bytes) else data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if sync:
                sync_directory(path.parent)
    except BaseException:
        remove_tree(temporary)
        raise


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON: NaN and infinities become null, as JSON lacks them; NumPy-like scalars become numbers."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, allow_nan=False, indent=indent, separators=separators)
    except (ValueError, TypeError):
        return json.dumps(_plain(value), allow_nan=False, indent=indent, separators=separators)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    to_list = getattr(value, "tolist", None)  # NumPy and torch values, without importing either
    if callable(to_list):
        return _plain(to_list())
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def load_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        StorageError: the file is missing, unreadable, or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise StorageError(f"could not read {path}: it is not JSON ({error})") from error

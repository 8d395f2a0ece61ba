"""Storage of checkpoints: a local directory, or any filesystem that pyarrow.fs can reach. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from orchestray.platform.errors import StorageError
from orchestray.platform.run.files import (
    is_temporary,
    remove_stale_temporaries,
    remove_tree,
    storage_error,
    storage_errors,
    sync_directory,
    temporary_sibling,
)

OpenForWriting = Callable[[str], contextlib.AbstractContextManager[Callable[[Any], object]]]
REPLACED = ".replaced"
IN_MEMORY = "memory+http"


class Store(Protocol):
    """A set of folders of files, in which a folder appears completely or not at all.

    Every method raises StorageError if the disk or the object store refuses.
    """

    location: str
    """Location for `open_store`, in any process."""
    shown: str
    """Location without any secret, for errors and displays."""

    def names(self) -> list[str]:
        """Return the names of the folders."""

    def open_read(self, name: str, file: str) -> contextlib.AbstractContextManager[Any]:
        """Open a file of a folder for reading (`read(size)`, `readinto`)."""

    def size(self, name: str, file: str) -> int:
        """Return the size of a file in bytes; -1 if it does not exist."""

    def create(self, name: str) -> contextlib.AbstractContextManager[OpenForWriting]:
        """Make a folder from the files that the body writes; if the body raises, no folder is made.

        The body gets a function that opens a file of the new folder for writing. It must write the file that makes the
        folder valid last. An existing folder of that name is replaced.
        """

    def remove(self, name: str) -> None:
        """Remove a folder."""

    def clean(self) -> list[str]:
        """Remove folders that dead processes left half-written; return the names."""


def open_store(location: str | os.PathLike[str]) -> Store:
    """Return the store at a local path or a URI of pyarrow.fs (`s3://bucket/path`, `gs://`, `hdfs://`, `file:///path`).

    Within the platform, the location of `memory_store.HeldFolders` is accepted as well.

    Raises:
        StorageError: the URI is invalid, or its filesystem does not answer.
    """
    text = os.fspath(location)
    if "://" not in text:
        return LocalStore(Path(text))
    if text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://").removeprefix("localhost")))
    if text.startswith(f"{IN_MEMORY}://"):
        from orchestray.platform.run.memory_store import MemoryStore

        return MemoryStore(text)
    import pyarrow as pa
    from pyarrow import fs

    try:
        filesystem, path = fs.FileSystem.from_uri(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(
            f"cannot use checkpoint.storage {text!r}: {error}; wanted a directory or a pyarrow.fs URI such as s3://bucket/path"
        ) from error
    return ArrowStore(text, filesystem, path)


class LocalStore:
    """Folders of a local directory: written beside their final place, synced, and renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.location = self.shown = str(self.root)

    def names(self) -> list[str]:
        with storage_errors(f"read {self.shown}"):
            try:
                return sorted(
                    entry.name for entry in self.root.iterdir() if entry.is_dir() and not is_temporary(entry.name)
                )
            except FileNotFoundError:
                return []

    @contextlib.contextmanager
    def open_read(self, name: str, file: str) -> Iterator[Any]:
        path = self.root / name / file
        with storage_errors(f"read {path}"), path.open("rb", buffering=0) as stream:
            yield stream

    def size(self, name: str, file: str) -> int:
        path = self.root / name / file
        with storage_errors(f"read {path}"):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return -1

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[OpenForWriting]:
        final = self.root / name
        temporary = temporary_sibling(final)

        @contextlib.contextmanager
        def open_file(file: str) -> Iterator[Callable[[Any], object]]:
            path = temporary / file
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                yield lambda data: _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        try:
            with storage_errors(f"write {final}"):
                self.root.mkdir(parents=True, exist_ok=True)
                temporary.mkdir()
                yield open_file
                for folder, _, _ in os.walk(temporary):
                    sync_directory(Path(folder))
                self._put_in_place(temporary, final)
        except BaseException:
            remove_tree(temporary)
            raise

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        # A folder cannot be renamed over a non-empty one. The old one stays readable under a second name meanwhile, so
        # that a kill at any point leaves at least one of the two.
        replaced = final.with_name(final.name + REPLACED)
        if final.exists():
            remove_tree(replaced)
            final.rename(replaced)
        temporary.rename(final)
        sync_directory(self.root)
        remove_tree(replaced)

    def remove(self, name: str) -> None:
        path = self.root / name
        aside = temporary_sibling(path)
        with storage_errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            path.rename(aside)  # in one step, so that a kill does not leave half of a folder under a valid name
        remove_tree(aside)

    def clean(self) -> list[str]:
        with storage_errors(f"clean up {self.shown}"):
            removed = remove_stale_temporaries(self.root)
        for name in self.names():
            if name.endswith(REPLACED) and (self.root / name.removesuffix(REPLACED)).exists():
                self.remove(name)
                removed.append(name)
        return removed


class ArrowStore:
    """Folders of a pyarrow filesystem.

    An object store cannot rename, so the file that makes a folder valid is written last, and removed first.
    """

    def __init__(self, location: str, filesystem: Any, path: str) -> None:
        self.location = self.shown = location
        self._filesystem = filesystem
        self._path = path.rstrip("/")

    def names(self) -> list[str]:
        from pyarrow import fs

        with self._errors(f"read {self.shown}"):
            selector = fs.FileSelector(self._path, allow_not_found=True)
            infos = self._filesystem.get_file_info(selector)
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    @contextlib.contextmanager
    def open_read(self, name: str, file: str) -> Iterator[Any]:
        what = f"read {self.shown}/{name}/{file}"
        with self._errors(what), self._filesystem.open_input_stream(self._at(name, file)) as stream:
            yield stream

    def size(self, name: str, file: str) -> int:
        with self._errors(f"read {self.shown}/{name}/{file}"):
            size = self._filesystem.get_file_info(self._at(name, file)).size
        return -1 if size is None else int(size)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[OpenForWriting]:

        @contextlib.contextmanager
        def open_file(file: str) -> Iterator[Callable[[Any], object]]:
            with self._filesystem.open_output_stream(self._at(name, file)) as stream:
                yield stream.write

        self.remove(name)
        try:
            with self._errors(f"write {self.shown}/{name}"):
                self._filesystem.create_dir(self._at(name), recursive=True)
                yield open_file
        except BaseException:
            with contextlib.suppress(StorageError):
                self.remove(name)
            raise

    def remove(self, name: str) -> None:
        with self._errors(f"remove {self.shown}/{name}"), contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_file(self._at(name, "state.json"))
            self._filesystem.delete_dir(self._at(name))

    def clean(self) -> list[str]:
        """Return no names: a folder without its last file does not count, and is replaced when its step is saved."""
        return []

    def _at(self, *parts: str) -> str:
        return "/".join((self._path, *parts))

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except OSError as error:
            raise storage_error(error, what) from error
        except pa.ArrowException as error:
            raise StorageError(f"could not {what}: {error}") from error


def _write_all(descriptor: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]

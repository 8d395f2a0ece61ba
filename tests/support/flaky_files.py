"""A filesystem whose reads fail when a test says so."""

from __future__ import annotations

from collections import deque
from typing import Any

import fsspec
import pyarrow.dataset as ds
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem


class FlakyFiles(LocalFileSystem):
    """The local filesystem, each of whose reads raises the next error of `errors`, if it is not None."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.errors: deque[BaseException | None] = deque()
        self.num_reads = 0

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        return _Opened(path, mode, fs=self, **options)

    def dataset(self, paths: list[str]) -> ds.Dataset:
        """Open Parquet files here."""
        return ds.dataset(paths, filesystem=PyFileSystem(FSSpecHandler(self)), format="parquet")


class _Opened(LocalFileOpener):
    def read(self, *arguments: Any) -> bytes:
        files: Any = self.fs
        files.num_reads += 1
        if files.errors and (error := files.errors.popleft()) is not None:
            raise error
        content: bytes = super().read(*arguments)
        return content


assert fsspec.__version__  # a dependency of Ray's

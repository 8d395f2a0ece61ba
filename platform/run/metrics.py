"""Append-only logs of JSON lines: `metrics.jsonl` (one line per step) and `events.jsonl` (one line per event).

A process killed while it appends leaves a torn last line. It is ignored on reading, and cut off before the next append.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.errors import StorageError
from orchestray.platform.run.files import (
    dump_json,
    remove_tree,
    storage_errors,
    sync_directory,
    temporary_sibling,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

_BUFFER_BYTES = 256 * 1024


class JsonLinesLog:
    """An append-only file of JSON lines, which are buffered until `flush` and reach the file complete and in order.

    Safe to use from several threads. Opening it cuts off a torn line that a killed process left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._buffered_bytes = 0
        with storage_errors(f"open {path}"):
            _cut_torn_line(path)
            self._descriptor = self._open()

    def append_lines(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add `lines`; they reach the file at the next `flush`, or when the buffer is full."""
        texts = [dump_json(line) for line in lines]
        with self._lock:
            self._buffer.extend(texts)
            self._buffered_bytes += sum(map(len, texts))
            if self._buffered_bytes >= _BUFFER_BYTES:
                self._write_buffer()

    def flush(self) -> None:
        """Pass every line to the operating system, so that a kill of this process cannot lose it."""
        with self._lock:
            self._write_buffer()

    def close(self) -> None:
        """Flush, fsync and close; may be called again."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                self._write_buffer()
                with contextlib.suppress(OSError):  # a pipe or /dev/full has nothing to sync
                    os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep_only(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file, atomically, without the lines for which `keep` is false; return the number removed.

        Lines that are not JSON are removed as well, as nothing could read them.
        """
        with self._lock:
            self._write_buffer()
            with storage_errors(f"rewrite {self.path}"):
                return self._rewrite(keep)

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        temporary = temporary_sibling(self.path)
        num_dropped = 0
        try:
            with self.path.open("rb") as old, temporary.open("wb") as new:
                for raw in old:
                    line = _parse(raw) if raw.endswith(b"\n") else None
                    if line is not None and keep(line):
                        new.write(raw)
                    else:
                        num_dropped += 1
                new.flush()
                os.fsync(new.fileno())
            if num_dropped:
                temporary.replace(self.path)
                sync_directory(self.path.parent)
                os.close(self._descriptor)
                self._descriptor = self._open()
        finally:
            remove_tree(temporary)
        return num_dropped

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _write_buffer(self) -> None:
        if self._descriptor < 0:
            raise StorageError(f"could not write {self.path}: it is closed")
        if not self._buffer:
            return
        data = memoryview(("\n".join(self._buffer) + "\n").encode())
        self._buffer.clear()
        self._buffered_bytes = 0
        with storage_errors(f"write {self.path}"):
            while data:
                data = data[os.write(self._descriptor, data) :]


class MetricsLog(JsonLinesLog):
    """The log `metrics.jsonl`: one line per step, and validation lines, which have `split: "validation"`."""

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines; each has `step` (the first is 1) and plain JSON values. NaN and infinities are written as null."""
        self.append_lines(lines)

    def truncate_after(self, step: int) -> int:
        """Drop the lines of steps > `step`, as recovery goes back to a checkpoint; return the number dropped."""
        return self.keep_only(lambda line: int(line.get("step", 0)) <= step)

    def last_time_s(self) -> float | None:
        """Return the `time_s` of the last training line; None if there is none."""
        self.flush()
        steps = [line for line in read_tail(self.path) if "split" not in line]
        return float(steps[-1]["time_s"]) if steps else None


class EventLog(JsonLinesLog):
    """The log `events.jsonl`: one line per event, on the disk before `append` returns."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Open the log; `clock` returns the seconds since the start of the run."""
        super().__init__(path)
        self._clock = clock

    def append(self, event: str, *, role: str | None = None, rank: int | None = None, **more: Any) -> dict[str, Any]:
        """Record `event` now, and return the line; `more` are further JSON values."""
        line = self.line(event, role=role, rank=rank, **more)
        self.append_lines([line])
        self.flush()
        return line

    def line(self, event: str, *, role: str | None = None, rank: int | None = None, **more: Any) -> dict[str, Any]:
        """Return the line of an event that happens now, without writing it."""
        return {"event": event, "time_s": round(self._clock(), 6), "role": role, "rank": rank, **more}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, in order; a missing file has none, and a torn last line is dropped.

    Raises:
        StorageError: a line before the last is not a JSON object.
    """
    try:
        raw_lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror or error}") from error
    lines = []
    for number, raw in enumerate(raw_lines, start=1):
        line = _parse(raw) if raw.endswith(b"\n") else None
        if line is not None:
            lines.append(line)
        elif number < len(raw_lines):
            raise StorageError(f"could not read {path}: line {number} is not a JSON object; the file was damaged")
    return lines


def read_tail(path: Path, num_bytes: int = 64 * 1024) -> list[dict[str, Any]]:
    """Return the complete lines within the last `num_bytes` of a log, for a quick look at a long run."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            raw_lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    lines = [_parse(raw) for raw in raw_lines[1 if start else 0 :] if raw.endswith(b"\n")]
    return [line for line in lines if line is not None]


def read_metrics(path: Path) -> pa.Table:
    """Return `metrics.jsonl` as a table: one row per line, one column per key of any line (null where missing).

    Objects are columns of structs. Values of several types under one key are texts; those that were none, as JSON.
    """
    import pyarrow as pa

    lines = read_lines(path)
    names = list(dict.fromkeys(name for line in lines for name in line))
    return pa.table({name: _column([line.get(name) for line in lines]) for name in names})


def _column(values: Sequence[Any]) -> pa.Array:
    import pyarrow as pa

    names = list(dict.fromkeys(name for value in values if isinstance(value, dict) for name in value))
    if names and all(value is None or isinstance(value, dict) for value in values):
        inner = [_column([None if value is None else value.get(name) for value in values]) for name in names]
        return pa.StructArray.from_arrays(inner, names, mask=pa.array([value is None for value in values]))
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # numbers and texts under one key, or more than 64 bits
        return pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _cut_torn_line(path: Path) -> None:
    """Cut off everything after the last complete line of `path`."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        end = size = file.seek(0, os.SEEK_END)
        if not path.is_file():
            return
        while end > 0:
            start = _line_start(file.fileno(), end)
            raw = os.pread(file.fileno(), end - start, start)
            if raw.endswith(b"\n") and _parse(raw) is not None:
                break
            end = start
        if end < size:
            file.truncate(end)


def _line_start(descriptor: int, end: int) -> int:
    """Return the start of the line that ends before `end` (its own line break, at `end` - 1, does not count)."""
    stop = end - 1
    while stop > 0:
        start = max(0, stop - 65536)
        found = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0

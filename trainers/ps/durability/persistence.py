"""A server on disk: a snapshot and a log of the entries after it, from which a new process makes the same server.

An entry is in the log before its effects are visible to workers (Li et al. 2014, section 4.3, of copies; Gray and
Reuter 1992, section 9.3, of logs). If the last record of a log is incomplete, the log ends before it: no worker was
sent its effects.

`snapshot-N.safetensors` holds the tensors after N entries. `snapshot-N.json` holds the rest and is written last.
`log-N` holds the records after it: three lengths, a checksum, the entry, its tensors' types, their bytes. Its server
has it locked: one that was declared dead may still write, and is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.comm.channel.wire import flat_bytes, spec_of
from orchestray.platform.errors import CheckpointError, OrchestrayError, StorageError
from orchestray.platform.run.tensor_file import pack, unpack
from orchestray.trainers.ps.protocol.requests import Entry, Header
from orchestray.trainers.ps.server.state_machine import Machine

_RECORD = struct.Struct("<QQQI")  # bytes of the entry, of the tensors' types, of the tensors; CRC-32 of all
_LOG_BYTES = 1 << 30
_PATIENCE_S = 10.0


class DiskLog:
    """A `Follower` that writes the entries to a directory of its own.

    A killed process loses nothing; against a machine that loses power use `sync=True`. `append` raises StorageError if
    the disk refuses the entry; the log then holds the entries before it.
    """

    def __init__(self, directory: Path, *, sync: bool = False, log_bytes: int = _LOG_BYTES) -> None:
        """
        Args:
            directory: directory of this server alone; created if missing.
            sync: wait for the disk at each entry.
            log_bytes: size in bytes above which a new snapshot replaces the log.
        """
        self.name = f"log in {directory.name}"
        self._directory = directory
        self._sync = sync
        self._limit_bytes = log_bytes
        self._machine: Machine | None = None
        self._log: IO[bytes] | None = None
        self._num_entries = self._first_entry = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `entries` written; empty before the first one."""
        written = self._num_entries - self._first_entry
        return {"entries": written} if written else {}

    def begin(self, machine: Machine) -> None:
        self._machine = machine
        self._directory.mkdir(parents=True, exist_ok=True)
        self._num_entries = self._first_entry = max(_snapshots(self._directory), default=-1) + 1
        self._begin_log()

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        if self._log is None:
            raise StorageError(f"{self.name} is closed")
        if self._log.tell() > self._limit_bytes:
            self._begin_log()
        flats = [flat_bytes(tensor) for tensor in tensors]
        header, specs = Header(entry).encode(), json.dumps([spec_of(tensor) for tensor in tensors]).encode()
        checksum = zlib.crc32(specs, zlib.crc32(header))
        for flat in flats:
            checksum = zlib.crc32(flat.numpy().data, checksum)
        prefix = _RECORD.pack(len(header), len(specs), sum(flat.numel() for flat in flats), checksum)
        parts: list[bytes | memoryview] = [prefix + header + specs, *(flat.numpy().data for flat in flats)]
        begins_at = self._log.tell()
        try:
            for part in parts:
                _write_all(self._log, part)
            if self._sync:
                os.fsync(self._log.fileno())
        except OSError as error:
            self._cut_back_to(begins_at)
            raise StorageError(f"An update could not be written to {self._directory}: {error}") from error
        self._num_entries += 1
        return _done

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _cut_back_to(self, num_bytes: int) -> None:
        """Remove the incomplete record: reading stops at the first incomplete record, whatever follows it."""
        assert self._log is not None
        try:
            self._log.seek(num_bytes)
            self._log.truncate()
        except OSError:
            self.close()  # nothing more may be acknowledged

    def _begin_log(self) -> None:
        """Write a snapshot of the present state and begin an empty log after it; remove the earlier ones."""
        assert self._machine is not None
        number, directory = self._num_entries, self._directory
        state, tensors = self._machine.state()
        older, before = _snapshots(directory), self._log
        try:
            _write(directory / f"snapshot-{number}.safetensors", pack(tensors), sync=self._sync)
            self._log = (directory / f"log-{number}").open("wb", buffering=0)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(directory / f"snapshot-{number}.json", json.dumps(state).encode(), sync=self._sync)
            if before is not None:
                before.close()
            for earlier in older:
                for name in (f"snapshot-{earlier}.json", f"snapshot-{earlier}.safetensors", f"log-{earlier}"):
                    (directory / name).unlink(missing_ok=True)
        except OSError as error:
            self.close()  # a log without its snapshot is never read
            if before is not None:
                before.close()
            raise StorageError(f"A server's state could not be written to {directory}: {error}") from error


def holds_snapshot(directory: Path) -> bool:
    """Return True if `restore` finds a snapshot there; False if the server was lost before it had written any."""
    return bool(_snapshots(directory))


def restore(directory: Path, machine: Machine) -> int:
    """Give a machine the state of the server that wrote a log, up to the last complete record.

    Args:
        directory: directory of a `DiskLog`; only read.
        machine: machine made with the same arguments as that server's.

    Returns:
        Number of entries taken from the log.

    Raises:
        CheckpointError: the snapshot is missing or damaged, or its server still writes.
    """
    number = _settled(directory)
    try:
        state = json.loads((directory / f"snapshot-{number}.json").read_bytes())
        data = np.fromfile(directory / f"snapshot-{number}.safetensors", dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The snapshot {number} in {directory} cannot be read: {error}") from error
    machine.load_state(state, unpack(data, f"{directory}/snapshot-{number}.safetensors"))
    num_entries = 0
    for entry, tensors in _records(directory / f"log-{number}"):
        with contextlib.suppress(OrchestrayError):  # the server had the same error, and sent it to its worker
            machine.apply(entry, tensors)
        num_entries += 1
    return num_entries


def _settled(directory: Path) -> int:
    """Return the number of the newest snapshot once nobody writes its log."""
    while found := _snapshots(directory):
        number = max(found)
        is_there = False
        with (
            contextlib.suppress(FileNotFoundError),  # its server may have replaced it since the listing
            (directory / f"log-{number}").open("rb") as log,
        ):
            is_there = True
            _wait_for_writer(log)
        if max(_snapshots(directory), default=None) == number:
            if not is_there:
                raise CheckpointError(f"{directory} holds snapshot {number}, but not log-{number} of what came after.")
            return number
    raise CheckpointError(f"{directory} holds no snapshot of a parameter server, so none can be made of it.")


def _wait_for_writer(log: IO[bytes]) -> None:
    began_s = time.monotonic()
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - began_s > _PATIENCE_S:
                raise CheckpointError(
                    f"{log.name} is still written by the parameter server that was given up, after {_PATIENCE_S:g} s. "
                    "End that process, and go on with --resume."
                ) from None
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks
        else:
            return


def _records(path: Path) -> Iterator[tuple[Entry, list[Tensor]]]:
    with path.open("rb") as log:
        size = path.stat().st_size
        while len(prefix := log.read(_RECORD.size)) == _RECORD.size:
            *num_bytes, checksum = _RECORD.unpack(prefix)
            if sum(num_bytes) > size - log.tell():  # incomplete; a damaged length is not to be read: it may be any
                return
            header, specs, values = (log.read(length) for length in num_bytes)
            if zlib.crc32(values, zlib.crc32(specs, zlib.crc32(header))) != checksum:
                return
            yield Header.decode(Entry, header).sections, _tensors(bytearray(values), json.loads(specs))


def _tensors(values: bytearray, specs: Sequence[Any]) -> list[Tensor]:
    tensors, start = [], 0
    for name, shape in specs:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        flat = flat_bytes(tensor)
        if flat.numel():
            flat.copy_(torch.frombuffer(values, dtype=torch.uint8, count=flat.numel(), offset=start))
        start += flat.numel()
        tensors.append(tensor)
    return tensors


def _snapshots(directory: Path) -> list[int]:
    return [int(path.stem.removeprefix("snapshot-")) for path in directory.glob("snapshot-*.json")]


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of the data.

    An unbuffered write may take less than it is given: on a disk that becomes full, or of more than 2 GiB.
    """
    rest = memoryview(data)
    while rest.nbytes:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[taken:]


def _write(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a file as a whole or not at all."""
    aside = path.with_suffix(".part")
    with aside.open("wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    aside.replace(path)


def _done() -> None:
    return

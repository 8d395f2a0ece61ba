"""The files of a checkpoint, and the search for the newest one that is undamaged. Imports no torch.

A checkpoint is a folder `step-00000100`. It contains `model.safetensors`, `optimizer.safetensors` and, if replicas have
a state of their own, `exchange.safetensors`. What only going on needs of the model is in `resume.safetensors`.
`state.json` is written last. It holds the size and CRC-32 of the others, a CRC-32 of itself, and the trainer's own
state.
"""

from __future__ import annotations

import errno
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestray.platform.errors import CheckpointError, StorageError
from orchestray.platform.process.pulse import PULSE
from orchestray.platform.run.files import dump_json
from orchestray.platform.run.store import REPLACED, Store, open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np

FORMAT_VERSION = 1
STATE_FILE = "state.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
EXCHANGE_FILE = "exchange.safetensors"
RESUME_FILE = "resume.safetensors"
CHUNK_BYTES = 16 * 1024 * 1024
BEST_STEP = "best_step"
"""Key of a checkpoint's state for the step of the best one so far, which is kept besides the newest ones."""

_OF_THE_FILE = (errno.EIO, errno.EISDIR, errno.ENOTDIR)
"""Errors of a file that is damaged: others are those of its storage, and may pass."""
_NAME = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")


@dataclass(frozen=True)
class FileSum:
    """The size of a file in bytes, and its CRC-32."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Found:
    """A checkpoint whose `state.json` is complete; plain data that can be sent to any process."""

    location: str
    name: str
    step: int
    files: Mapping[str, FileSum]
    state: dict[str, Any] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors' files."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def best_step(self) -> int | None:
        """Step of the run's best checkpoint up to this one; None if none is chosen."""
        step = self.state.get(BEST_STEP)
        return None if step is None else int(step)


def checkpoint_name(step: int) -> str:
    """Return the folder's name: `step-00000100`."""
    return f"step-{step:08d}"


def checkpoint_steps(store: Store) -> list[tuple[int, str]]:
    """Return (step, name) of each folder that is named like a checkpoint, oldest first, complete or not."""
    matches = [_NAME.fullmatch(name) for name in store.names()]
    # Of two folders of one step, the one that was being replaced counts as the older.
    return [
        (int(match[1]), match[0])
        for match in sorted(filter(None, matches), key=lambda match: (int(match[1]), match[2] is None))
    ]


def encode_state(step: int, state_json: str, files: Mapping[str, FileSum]) -> bytes:
    """Return the content of `state.json`; `state_json` is the trainer's state as written by `dump_json`."""
    sums = {name: {"bytes": file.num_bytes, "crc32": file.crc32} for name, file in files.items()}
    head = dump_json({"version": FORMAT_VERSION, "step": step, "files": sums})
    content = f'{head[:-1]},"state":{state_json}}}'
    return f'{{"crc32":{zlib.crc32(content.encode())},\n"checkpoint":{content}}}\n'.encode()


def list_checkpoints(location: str | os.PathLike[str]) -> list[Found]:
    """Return the checkpoints with a complete `state.json` and files of the right sizes, oldest first.

    Checksums of tensors are not checked here, but in `latest_good`.
    """
    store = open_store(location)
    found = []
    for _, name in checkpoint_steps(store):
        checkpoint = _read_state(store, name)
        if isinstance(checkpoint, Found) and not _wrong_size(store, checkpoint):
            found.append(checkpoint)
    return found


def best_checkpoint(location: str | os.PathLike[str]) -> Found | None:
    """Return the best checkpoint of a run, as its newest one names it; None if none is chosen.

    Raises:
        CheckpointError: it is missing or incomplete.
        StorageError: the storage cannot be read.
    """
    every = list_checkpoints(location)
    step = every[-1].best_step if every else None
    if step is None:
        return None
    for found in reversed(every):
        if found.step == step:
            return found
    raise CheckpointError(f"the best checkpoint, {checkpoint_name(step)}, is missing or incomplete in {location}")


class Damaged(NamedTuple):
    """A checkpoint that cannot be used."""

    name: str
    reason: str


def latest_good(location: str | os.PathLike[str]) -> tuple[Found | None, list[str]]:
    """Return the newest checkpoint with valid checksums, or None, and a warning for each newer one that is damaged.

    Raises:
        StorageError: the storage cannot be read.
    """
    good, damage = newest_checkpoint(location)
    return good, [damage_text(one, good) for one in damage]


def damage_text(damaged: Damaged, good: Found | None) -> str:
    """Return a sentence about a checkpoint that is damaged, and what is used instead."""
    instead = f"using {good.name}" if good else "no older one is left"
    return f"checkpoint {damaged.name} is damaged ({damaged.reason}); {instead}"


def newest_checkpoint(location: str | os.PathLike[str]) -> tuple[Found | None, list[Damaged]]:
    """Return the newest checkpoint with valid checksums, or None, and the newer ones that are damaged.

    Raises:
        StorageError: the storage cannot be read.
    """
    store = open_store(location)
    damage: list[Damaged] = []
    good: Found | None = None
    for _, name in reversed(checkpoint_steps(store)):
        found = _read_state(store, name)
        problem = found if isinstance(found, str) else _wrong_size(store, found) or _wrong_checksum(store, found)
        if isinstance(found, Found) and not problem:
            good = found
            break
        damage.append(Damaged(name, str(problem)))
    return good, damage


def read_checked(store: Store, name: str, file: str, expected: FileSum) -> np.ndarray[Any, Any]:
    """Return the bytes of a file of the folder `name` (uint8, writable), after a check of its checksum.

    Raises:
        CheckpointError: the file is damaged.
        StorageError: the file cannot be read.
    """
    import numpy as np

    data = np.empty(expected.num_bytes, dtype=np.uint8)
    view = data.data
    crc = position = 0
    with store.open_read(name, file) as stream:
        while position < expected.num_bytes:
            num_read = stream.readinto(view[position : position + CHUNK_BYTES])
            if not num_read:
                break
            crc = zlib.crc32(view[position : position + num_read], crc)
            PULSE.beats += 1
            position += num_read
    if position != expected.num_bytes or crc != expected.crc32:
        raise CheckpointError(f"{store.shown}/{name} is damaged ({file}: checksum differs)")
    return data


def _read_state(store: Store, name: str) -> Found | str:
    """Return the checkpoint of a folder, or a description of its damage."""
    try:
        with store.open_read(name, STATE_FILE) as stream:
            outer = json.loads(stream.read())
        content = outer["checkpoint"]
        if zlib.crc32(dump_json(content).encode()) != outer["crc32"]:
            return f"{STATE_FILE}: checksum differs"
        if content["version"] > FORMAT_VERSION:
            return f"{STATE_FILE}: written by a newer orchestray (format {content['version']})"
        files = {file: FileSum(entry["bytes"], entry["crc32"]) for file, entry in content["files"].items()}
        return Found(store.location, name, content["step"], files, content["state"])
    except StorageError as error:
        return f"{STATE_FILE}: {_damage(error)}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE_FILE}: not readable"


def _damage(error: StorageError) -> str:
    """Return what is wrong with a file that could not be read.

    Raises:
        StorageError: nothing, but the storage did not give it: a checkpoint that may be good must not be passed over.
    """
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        return "missing"
    if isinstance(cause, OSError) and cause.errno in _OF_THE_FILE:
        return f"not readable ({cause.strerror})"
    raise error


def _wrong_size(store: Store, found: Found) -> str:
    for file, expected in found.files.items():
        size = store.size(found.name, file)
        if size != expected.num_bytes:
            has = "missing" if size < 0 else f"has {size} bytes"
            return f"{file}: {has}, wanted {expected.num_bytes} bytes"
    return ""


def _wrong_checksum(store: Store, found: Found) -> str:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for file, expected in found.files.items():
        crc = 0
        try:
            with store.open_read(found.name, file) as stream:
                while num_read := stream.readinto(buffer):
                    crc = zlib.crc32(buffer[:num_read], crc)
                    PULSE.beats += 1
        except StorageError as error:
            return f"{file}: {_damage(error)}"
        if crc != expected.crc32:
            return f"{file}: checksum differs"
    return ""

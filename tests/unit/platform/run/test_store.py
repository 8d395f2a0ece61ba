from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow.fs
import pytest
import torch

from orchestray.platform.errors import CheckpointError, StorageError
from orchestray.platform.process.sockets import listen
from orchestray.platform.run import memory_store
from orchestray.platform.run.checkpoint import (
    CheckpointWriter,
    latest_good,
    list_checkpoints,
    load_checkpoint,
    load_tensors,
    stream_checkpoint,
)
from orchestray.platform.run.checkpoint_files import MODEL_FILE, FileSum
from orchestray.platform.run.memory_store import HeldFolders, HolderLostError
from orchestray.platform.run.store import LocalStore, open_store
from support.patience import PATIENCE_S


@pytest.fixture
def remote() -> str:
    """Return a place on a file system that is not this machine's disk: fsspec's, in memory, behind pyarrow.fs."""
    return f"fsspec+memory:///bucket-{uuid.uuid4().hex}/run"


@pytest.fixture
def held() -> Iterator[HeldFolders]:
    with HeldFolders() as folders:
        yield folders


@pytest.fixture(params=["local", "remote", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path, remote: str, held: HeldFolders) -> str:
    return {"local": str(tmp_path), "remote": remote, "memory": held.location}[request.param]


def save(writer: CheckpointWriter, *steps: int) -> None:
    for step in steps:
        writer.save_async(step, {"w": torch.full((5000,), float(step))}, {}, {"step": step})
    writer.wait()


def test_checkpoints_go_there_and_come_back(location: str) -> None:
    with CheckpointWriter(location, keep=2) as writer:
        save(writer, 1, 2, 3)
        assert [found.step for found in list_checkpoints(location)] == [2, 3]
        save(writer, 3)  # a step again
    found, warnings = latest_good(location)
    assert found is not None
    assert (found.step, warnings) == (3, [])
    assert torch.equal(load_checkpoint(found)[0]["w"], torch.full((5000,), 3.0))


def test_a_remote_checkpoint_without_its_last_file_does_not_count(remote: str) -> None:
    with CheckpointWriter(remote, keep=2) as writer:
        save(writer, 1, 2)
    filesystem, path = pyarrow.fs.FileSystem.from_uri(remote)
    filesystem.delete_file(f"{path}/step-00000002/state.json")  # what a killed upload leaves has none
    found, warnings = latest_good(remote)
    assert found is not None
    assert found.step == 1
    assert warnings == ["checkpoint step-00000002 is damaged (state.json: missing); using step-00000001"]


def test_a_folder_whose_writing_fails_does_not_exist(location: str) -> None:
    store = open_store(location)

    def write_half() -> None:
        with store.create("step-00000001") as open_file:
            with open_file("model.safetensors") as write:
                write(b"half")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        write_half()
    assert store.names() == []


def test_a_missing_file_has_no_size_and_cannot_be_read(location: str) -> None:
    store = open_store(location)
    assert store.names() == []
    assert store.size("step-00000001", "state.json") == -1
    with pytest.raises(StorageError, match="could not read") as raised, store.open_read("step-00000001", "state.json"):
        pass
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    store.remove("step-00000001")


def test_files_come_back_as_they_were_written_in_pieces_and_empty_ones_too(location: str) -> None:
    store = open_store(location)
    pieces = [bytes(range(256)) * 1000, b"", memoryview(np.arange(3.0)), b"end"]
    with store.create("step-00000001") as open_file, open_file("a") as write, open_file("nothing"):
        for piece in pieces:
            write(piece)
    assert store.names() == ["step-00000001"]
    expected = b"".join(map(bytes, pieces))
    assert (store.size("step-00000001", "a"), store.size("step-00000001", "nothing")) == (len(expected), 0)
    with store.open_read("step-00000001", "a") as stream:
        assert stream.read() == expected


def test_what_a_process_holds_is_whole_or_not_there_whatever_who_writes_it_comes_to(held: HeldFolders) -> None:
    with open_store(held.location).create("step-00000001") as open_file, open_file("a") as write:
        write(b"old")
    program = f"""
import os
from orchestray.platform.run.store import open_store
with open_store({held.location!r}).create("step-00000001") as open_file, open_file("a") as write:
    write(b"new")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    store = open_store(held.location)
    with store.open_read("step-00000001", "a") as stream:
        assert stream.read() == b"old"
    assert held.names() == ["step-00000001"]


def test_who_cleans_up_leaves_what_another_is_writing_alone(location: str) -> None:
    store = open_store(location)
    with store.create("step-00000001") as open_file, open_file("a") as write:
        write(b"first, ")
        open_store(location).clean()
        write(b"second")
    with store.open_read("step-00000001", "a") as stream:
        assert stream.read() == b"first, second"


def test_what_is_larger_than_a_request_may_be_is_sent_in_several(
    held: HeldFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_store, "_PIECE_BYTES", 4)
    store = open_store(held.location)
    with store.create("step-00000001") as open_file, open_file("a") as write:
        write(b"0123456789")
    assert held.file("step-00000001", "a") == [b"", b"0123", b"4567", b"89"]


@pytest.mark.parametrize("length", [10**12, memory_store._PIECE_BYTES + 1, -1, None])
@pytest.mark.parametrize("knows_the_key", [True, False])
def test_who_asks_has_no_memory_set_aside_for_more_than_a_piece_or_without_the_key(
    held: HeldFolders, length: int | None, knows_the_key: bool
) -> None:
    place = urlsplit(held.location)
    told = "" if length is None else f"Content-Length: {length}\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0), PATIENCE_S) as connection:
        path = f"{place.path if knows_the_key else '/another'}/a"
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: here\r\n{told}\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # no body is waited for
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_a_folder_of_which_nothing_was_written_is_none(held: HeldFolders) -> None:
    with pytest.raises(StorageError, match="no such place"), open_store(held.location).create("step-00000001"):
        pass
    assert held.names() == []


def test_who_does_not_know_the_key_neither_reads_nor_writes_what_a_process_holds(held: HeldFolders) -> None:
    with open_store(held.location).create("step-00000001") as open_file, open_file("a") as write:
        write(b"own")
    stranger = open_store(held.location[:-1] + ("a" if held.location[-1] != "a" else "b"))
    assert stranger.size("step-00000001", "a") == -1
    for act in (stranger.names, lambda: stranger.remove("step-00000001")):
        with pytest.raises(StorageError):
            act()
    with pytest.raises(StorageError), stranger.create("step-00000001") as open_file, open_file("a") as write:
        write(b"other")
    assert held.file("step-00000001", "a") == [b"", b"own"]


def test_a_process_that_holds_folders_no_more_is_named_in_the_error() -> None:
    with HeldFolders() as folders:
        location = folders.location
    with pytest.raises(
        HolderLostError, match=r"could not read memory\+http.*: the process that held it does not"
    ) as told:
        open_store(location).names()
    assert urlsplit(location).path.strip("/") not in str(told.value)  # the key


def test_no_error_about_a_damaged_checkpoint_tells_the_key_to_it(held: HeldFolders) -> None:
    with CheckpointWriter(held.location, keep=1) as writer:
        save(writer, 1)
    (found,) = list_checkpoints(held.location)
    junk = bytearray(8)
    no_tensors = replace(found, files={MODEL_FILE: FileSum(len(junk), zlib.crc32(junk))})
    pieces = held.file(found.name, MODEL_FILE)
    assert pieces is not None
    pieces[-1][-1] ^= 1
    texts = []
    for act in (lambda: load_tensors(found, MODEL_FILE), lambda: list(stream_checkpoint(found, MODEL_FILE)[1])):
        with pytest.raises(CheckpointError, match="checksum") as told:
            act()
        texts.append(str(told.value))
    held.put(found.name, {MODEL_FILE: [junk]})
    for act in (lambda: load_tensors(no_tensors, MODEL_FILE), lambda: list(stream_checkpoint(no_tensors, MODEL_FILE))):
        with pytest.raises(CheckpointError, match="no safetensors header") as told:
            act()
        texts.append(str(told.value))
    place = urlsplit(held.location)
    for text in texts:
        assert f"{place.scheme}://{place.netloc}/{found.name}" in text
        assert place.path.strip("/") not in text


@contextlib.contextmanager
def asked_once(held: HeldFolders) -> Iterator[HTTPConnection]:
    """Yield a connection after one request, on which more could be sent."""
    place = urlsplit(held.location)
    connection = HTTPConnection(place.hostname or "", place.port or 0, timeout=PATIENCE_S)
    connection.request("GET", place.path)
    connection.getresponse().read()
    yield connection
    connection.close()


def test_who_is_connected_to_what_is_closed_sees_the_connection_end(held: HeldFolders) -> None:
    with asked_once(held) as connection:
        held.close()
        assert connection.sock.recv(1) == b""


def test_what_is_closed_holds_nothing_of_what_comes_later(held: HeldFolders) -> None:
    def write_on() -> None:
        with open_store(held.location).create("step-00000001") as open_file, open_file("a") as write:
            write(b"late")
            held.close()

    with pytest.raises(HolderLostError):
        write_on()
    assert not held.put("step-00000001", {"a": [bytearray(b"later")]})
    assert held.names() == []


def test_who_cannot_be_answered_for_want_of_a_thread_is_hung_up_on_and_the_next_is_answered(held: HeldFolders) -> None:
    store = open_store(held.location)
    before = threading.stack_size(1 << 46)  # no thread can start: there is no room for its stack
    try:
        with pytest.raises(HolderLostError):
            store.names()
    finally:
        threading.stack_size(before)
    assert store.names() == []


def test_a_machine_that_has_vanished_is_noticed_by_who_holds_what_it_wrote(held: HeldFolders) -> None:
    with asked_once(held):
        (connection,) = held._server._open
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        known = {name: value for name, value in memory_store._LIMITS.items() if hasattr(socket, name)}
        assert known
        assert known == {name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in known}


class SleepsOn(socket.socket):
    """A socket of a system that does not wake a thread that waits for a connection."""

    def shutdown(self, how: int) -> None:
        pass


def test_closing_ends_where_the_system_does_not_wake_who_waits_for_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_store, "listen", lambda *where, **key: SleepsOn(fileno=listen(*where, **key).detach()))
    folders = HeldFolders()
    closing = threading.Thread(target=folders.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_file_uri_is_a_local_directory(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert isinstance(store, LocalStore)
    assert store.location == str(tmp_path)


@pytest.mark.parametrize("uri", ["ftp://host/path", "fsspec+nothing://host/path", "s3://bucket:x/path"])
def test_a_uri_that_cannot_be_used_says_what_is_wanted(uri: str) -> None:
    with pytest.raises(StorageError, match=r"cannot use checkpoint.storage .*; wanted a directory or a pyarrow.fs URI"):
        open_store(uri)

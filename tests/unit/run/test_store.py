from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow.fs
import pytest
import torch

from orchestray.platform.errors import StorageError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, list_checkpoints, load_checkpoint
from orchestray.platform.run.store import LocalStore, open_store


@pytest.fixture
def remote() -> str:
    """A place on a file system that is not this machine's disk: fsspec's, in memory, behind pyarrow.fs."""
    return f"fsspec+memory:///bucket-{uuid.uuid4().hex}/run"


def save(writer: CheckpointWriter, *steps: int) -> None:
    for step in steps:
        writer.save_async(step, {"w": torch.full((5000,), float(step))}, {}, {"step": step})
    writer.wait()


def test_checkpoints_go_to_a_remote_file_system_and_come_back(remote: str) -> None:
    with CheckpointWriter(remote, keep=2) as writer:
        save(writer, 1, 2, 3)
        assert [found.step for found in list_checkpoints(remote)] == [2, 3]
        save(writer, 3)  # a step again
    found, warnings = latest_good(remote)
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


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_folder_whose_writing_fails_does_not_exist(kind: str, tmp_path: Path, remote: str) -> None:
    store = open_store(tmp_path if kind == "local" else remote)

    def write_half() -> None:
        with store.create("step-00000001") as open_file:
            with open_file("model.safetensors") as write:
                write(b"half")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        write_half()
    assert store.names() == []


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_missing_file_has_no_size_and_cannot_be_read(kind: str, tmp_path: Path, remote: str) -> None:
    store = open_store(tmp_path if kind == "local" else remote)
    assert store.names() == []
    assert store.size("step-00000001", "state.json") == -1
    with pytest.raises(StorageError, match="could not read"), store.open_read("step-00000001", "state.json"):
        pass
    store.remove("step-00000001")


def test_a_file_uri_is_a_local_directory(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert isinstance(store, LocalStore)
    assert store.location == str(tmp_path)


@pytest.mark.parametrize("uri", ["ftp://host/path", "fsspec+nothing://host/path", "s3://bucket:x/path"])
def test_a_uri_that_cannot_be_used_says_what_is_wanted(uri: str) -> None:
    with pytest.raises(StorageError, match=r"cannot use checkpoint.storage .*; wanted a directory or a pyarrow.fs URI"):
        open_store(uri)

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestray.platform.errors import StorageError
from orchestray.platform.run.files import (
    dump_json,
    load_json,
    remove_stale_temporaries,
    storage_error,
    temporary_sibling,
    write_atomic,
)


def test_a_file_is_old_or_new_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "value"
    script = (
        "import sys, pathlib; from orchestray.platform.run.files import write_atomic\n"
        "path = pathlib.Path(sys.argv[1]); number = 0\n"
        "while True:\n"
        "    write_atomic(path, bytes([65 + number % 26]) * 200_000); number += 1\n"
        "    print(number, flush=True)\n"
    )
    for num_writes in (1, 2, 5):
        with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(num_writes):
                process.stdout.readline()
            process.kill()
        content = path.read_bytes()
        assert len(content) == 200_000
        assert len(set(content)) == 1
    remove_stale_temporaries(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["value"]


def test_only_temporaries_of_dead_processes_are_removed(tmp_path: Path) -> None:
    mine = temporary_sibling(tmp_path / "a")
    mine.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGKILL)
    dead = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{process.pid}-")
    dead.mkdir()
    (dead / "half").write_bytes(b"x")
    other_host = tmp_path / ".tmp-another_host-1-0-a"
    other_host.touch()
    assert remove_stale_temporaries(tmp_path) == [dead.name]
    assert mine.exists()
    assert other_host.exists()
    os.utime(other_host, (0, 0))
    assert remove_stale_temporaries(tmp_path) == [other_host.name]


def test_a_failed_write_leaves_the_old_content_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.mkdir()  # a directory cannot be replaced by a file
    (path / "inside").touch()
    with pytest.raises(StorageError, match="could not write"):
        write_atomic(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["value"]


def test_numbers_that_json_has_not_become_null() -> None:
    assert dump_json({"loss": float("nan"), "more": [float("inf"), 1.5]}) == '{"loss":null,"more":[null,1.5]}'


def test_values_of_other_types_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object is no JSON value"):
        dump_json({"key": object()})


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(errno.ENOSPC, "the disk is full; free some space"), (errno.EACCES, "no permission"), (errno.EIO, "Input/output")],
)
def test_errors_of_the_disk_are_sentences(number: int, sentence: str) -> None:
    error = storage_error(OSError(number, os.strerror(number)), "write runs/a/config.yaml")
    assert str(error).startswith("could not write runs/a/config.yaml: ")
    assert sentence in str(error)
    assert error.exit_status == 1


def test_a_file_that_may_not_be_read_needs_its_owner_and_no_other_place() -> None:
    error = storage_error(PermissionError(errno.EACCES, "x"), "read /checkpoints/a/step-00000100/state.json")
    assert str(error).endswith("no permission to read it; ask its owner for that")


def test_a_damaged_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(StorageError, match=r"result\.json: it is not JSON"):
        load_json(tmp_path / "result.json")

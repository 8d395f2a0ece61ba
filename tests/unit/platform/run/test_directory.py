from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestray.platform.errors import RunNameError, StorageError
from orchestray.platform.run.directory import RunDirectory, RunPaths, is_live, read_config_text, read_result

HOLD = (
    "import sys; from orchestray.platform.run.directory import RunDirectory\n"
    "run = RunDirectory.create(sys.argv[1], 'held'); print('held', flush=True); sys.stdin.read()\n"
)


def test_a_name_in_use_is_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs", "a") as run:
        run.write_config("name: a\n")
    with pytest.raises(RunNameError, match=r"run name 'a' is in use .*--resume, or choose another name") as caught:
        RunDirectory.create(tmp_path / "runs", "a")
    assert caught.value.exit_status == 2
    assert (tmp_path / "runs" / "a" / "config.yaml").read_text() == "name: a\n"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\0b", "x" * 300])
def test_what_cannot_name_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunNameError, match="cannot name a directory"):
        RunDirectory.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_cannot_be_opened_and_a_killed_one_can(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_live(tmp_path / "held")
        with pytest.raises(RunNameError, match="is being written by another process"):
            RunDirectory.open_existing(tmp_path, "held")
        process.kill()
    assert not is_live(tmp_path / "held")
    with RunDirectory.open_existing(tmp_path, "held") as run:
        assert is_live(run.path)
    assert not is_live(tmp_path / "held")


WRITE_WHOLE = (
    "import sys; from orchestray.platform.run.directory import RunDirectory\n"
    "with RunDirectory.create_whole(sys.argv[1], 'a') as run:\n"
    "    run.write_config('name: a'); print('written', flush=True); sys.stdin.read()\n"
)


def test_a_run_that_is_made_whole_is_seen_when_it_is_complete(tmp_path: Path) -> None:
    with RunDirectory.create_whole(tmp_path, "a") as run:
        run.write_config("name: a\n")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "config.yaml").read_text() == "name: a\n"
    with pytest.raises(RunNameError, match="run name 'a' is in use"), RunDirectory.create_whole(tmp_path, "a"):
        pytest.fail("the body ran")

    def write_half() -> None:
        with RunDirectory.create_whole(tmp_path, "b") as run:
            run.write_config("name: b\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def write_late() -> None:
        with RunDirectory.create_whole(tmp_path, "a") as run:
            run.write_config("name: mine\n")
            with RunDirectory.create(tmp_path, "a") as other:
                other.write_config("name: other\n")

    with pytest.raises(RunNameError, match="in use"):
        write_late()
    assert (tmp_path / "a" / "config.yaml").read_text() == "name: other\n"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_run_whose_process_was_killed_before_it_was_whole_leaves_its_name_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_WHOLE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    with RunDirectory.create_whole(tmp_path, "a") as run:
        run.write_config("name: b\n")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_run_that_does_not_exist_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunNameError, match=r"there is no run .nope. .* no checkpoint\.storage that may have it"):
        RunDirectory.open_existing(tmp_path, "nope")


def test_opening_cleans_up_what_a_killed_process_left(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib\n"
        "from orchestray.platform.run.directory import RunDirectory\n"
        "from orchestray.platform.run.files import temporary_sibling\n"
        "run = RunDirectory.create(sys.argv[1], 'a')\n"
        "temporary_sibling(run.paths.result).touch()\n"
        "temporary_sibling(run.paths.checkpoints / 'step-00000001').mkdir(parents=True)\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    paths = RunPaths(tmp_path / "a")
    assert len([*paths.path.glob(".tmp-*"), *paths.checkpoints.glob(".tmp-*")]) == 2
    RunDirectory.open_existing(tmp_path, "a").close()
    assert [*paths.path.glob(".tmp-*"), *paths.checkpoints.glob(".tmp-*")] == []


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as run:
        assert run.read_result() is None
        run.write_config("name: a\n")
        run.write_actors([{"role": "worker", "rank": 0, "pid": 1, "node": "here"}])
        run.write_result({"status": "succeeded", "final": {"train": {"loss": float("nan")}}})
        assert run.paths.config.read_text() == "name: a\n"
        assert run.read_result() == {"status": "succeeded", "final": {"train": {"loss": None}}}
        assert json.loads(run.paths.actors.read_text())[0]["pid"] == 1
        run.remove_result()
        assert run.read_result() is None


def test_a_run_without_a_config_says_so(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as run, pytest.raises(StorageError, match=r"has no config\.yaml"):
        read_config_text(run.paths)


def test_a_place_that_is_not_writable_is_a_clear_error(mount_small_disk: Callable[..., Path]) -> None:
    disk = mount_small_disk("64k", "ro")
    with pytest.raises(StorageError, match=r"could not create the run directory .*/a: no permission to write there"):
        RunDirectory.create(disk / "runs", "a")


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(StorageError, match="could not create the run directory"):
        RunDirectory.create(tmp_path / "runs", "a")


def test_a_full_disk_keeps_the_old_result(mount_small_disk: Callable[..., Path]) -> None:
    with RunDirectory.create(mount_small_disk("64k"), "a") as run:
        run.write_result({"status": "interrupted"})
        with pytest.raises(StorageError, match=r"could not write .*result\.json: the disk is full"):
            run.write_result({"error": "x" * 100_000})
        assert run.read_result() == {"status": "interrupted"}


def test_runs_that_share_a_storage_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/storage"
    with RunDirectory.create(tmp_path, "a", storage=storage) as a, RunDirectory.create(tmp_path, "b") as b:
        a.write_config("name: a")
        assert a.checkpoint_location == f"{storage}/a"
        assert b.checkpoint_location == str(tmp_path / "b" / "checkpoints")
    (tmp_path / "storage" / "a" / "step-00000100").mkdir(parents=True)
    with pytest.raises(RunNameError, match=r"run name 'a' is in use in checkpoint\.storage: .*/storage/a holds"):
        RunDirectory.create(tmp_path / "other", "a", storage=storage)
    assert not (tmp_path / "other").exists()
    with RunDirectory.open_existing(tmp_path, "a", storage=storage) as resumed:
        assert resumed.checkpoint_location == f"{storage}/a"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_that_is_gone_is_made_again_from_the_storage(tmp_path: Path, scheme: str) -> None:
    storage = f"{scheme}{tmp_path}/storage"
    for text in ("epochs: 1", "epochs: 2"):
        with RunDirectory.open_existing(tmp_path / "lost", "a", storage=storage) as run:
            assert run.read_result() is None
            run.write_config(text)
            run.write_code({"files": {}})
            run.keep_elsewhere()
    with RunDirectory.open_existing(tmp_path / "new", "a", storage=storage) as again:
        assert read_config_text(again.paths) == "epochs: 2"
        assert json.loads(again.paths.code.read_text()) == {"files": {}}
    (tmp_path / "storage" / "a" / "run").rename(tmp_path / "storage" / "a" / "run.replaced")  # it was being replaced
    with RunDirectory.open_existing(tmp_path / "newer", "a", storage=storage) as again:
        assert read_config_text(again.paths) == "epochs: 2"


def test_what_is_kept_in_the_storage_is_written_again_only_if_it_has_changed(tmp_path: Path) -> None:
    kept = tmp_path / "storage" / "a" / "run"
    folders = []
    for text in ("epochs: 1", "epochs: 1", "epochs: 2"):
        with RunDirectory.open_existing(tmp_path / "runs", "a", storage=str(tmp_path / "storage")) as run:
            run.write_config(text)
            run.write_code({"files": {}})
            run.keep_elsewhere()
        folders.append(kept.stat().st_ino)
    assert folders[0] == folders[1] != folders[2]
    assert (kept / "config.yaml").read_text() == "epochs: 2"


def test_checkpoints_without_the_config_of_their_run_are_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "storage" / "a" / "step-00000100").mkdir(parents=True)
    with pytest.raises(RunNameError, match=r"run name 'a' is in use in checkpoint\.storage"):
        RunDirectory.open_existing(tmp_path / "new", "a", storage=str(tmp_path / "storage"))
    assert not (tmp_path / "new").exists()


def test_a_storage_that_cannot_be_used_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot use checkpoint\.storage"):
        RunDirectory.create(tmp_path, "a", storage="ftp://host/path")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_result_is_refused_with_what_to_do(content: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(StorageError, match=r"result\.json: it is not .*; it only says .* remove it, and --resume"):
        read_result(RunPaths(tmp_path))

"""Files that are sent with a job, and its command line: without a cluster."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.platform.jobs.address import job_address
from orchestray.platform.jobs.files import MAX_BYTES, JobFiles, copy_package
from orchestray.platform.jobs.submit import Body, Shown, entrypoint, exit_status_of


def _write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _sent(files: JobFiles, directory: Path) -> set[str]:
    files.check()
    files.copy_to(directory)
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_config_task_file_and_imported_neighbours_keep_their_places_to_each_other(tmp_path: Path) -> None:
    here = tmp_path / "project"
    config = _write(here / "conf/mine.yaml", "task: {type: ../tasks/mine.py:Mine}\n")
    _write(here / "tasks/mine.py", "import os, shapes, platform\ndef f():\n    from helpers.data import table\n")
    _write(here / "tasks/shapes.py", "import deeper")
    _write(here / "tasks/deeper.py")
    _write(here / "tasks/helpers/__init__.py")
    _write(here / "tasks/helpers/data.py", "import beside")
    _write(here / "tasks/beside.py")
    _write(here / "tasks/unneeded.py")
    _write(here / "tasks/platform.py")  # before the standard library's, as Python runs a script
    _write(here / "tasks/helpers/labels.json")
    _write(here / "tasks/helpers/__pycache__/data.cpython-311.pyc")
    files = JobFiles()
    files.add_config(config, "mine.yaml")
    assert _sent(files, tmp_path / "sent") == {
        "conf/mine.yaml",
        "tasks/mine.py",
        "tasks/shapes.py",
        "tasks/deeper.py",
        "tasks/beside.py",
        "tasks/helpers/__init__.py",
        "tasks/helpers/data.py",
        "tasks/helpers/labels.json",
        "tasks/platform.py",
    }
    assert (tmp_path / "sent/conf/mine.yaml").read_text() == config.read_text()


def test_task_file_of_a_package_is_sent_with_its_package(tmp_path: Path) -> None:
    config = _write(tmp_path / "conf/mine.yaml", "task: {type: ../lib/task.py:Mine}\n")
    for name, text in {"task": "from .net import Net", "net": "", "__init__": "", "sub/__init__": ""}.items():
        _write(tmp_path / f"lib/{name}.py", text)
    _write(tmp_path / "lib/labels.json")
    files = JobFiles()
    files.add_config(config, "mine.yaml")
    names = ("__init__.py", "labels.json", "net.py", "sub/__init__.py", "task.py")
    assert _sent(files, tmp_path / "sent") == {"conf/mine.yaml", *(f"lib/{name}" for name in names)}


def test_absolute_task_file_is_sent_and_named_relatively(tmp_path: Path) -> None:
    task = _write(tmp_path / "elsewhere/mine.py")
    config = _write(tmp_path / "conf/mine.yaml", f"name: mine\ntask: {{type: '{task}:Mine', lr: 1e-3}}\n")
    files = JobFiles()
    files.add_config(config, "mine.yaml")
    assert _sent(files, tmp_path / "sent") == {"conf/mine.yaml", "elsewhere/mine.py"}
    text = (tmp_path / "sent/conf/mine.yaml").read_text()
    assert "../elsewhere/mine.py:Mine" in text
    assert str(tmp_path) not in text


def test_relative_data_is_sent_and_absolute_data_is_the_clusters(tmp_path: Path) -> None:
    _write(tmp_path / "rows/part-0.parquet", "x")
    config = _write(tmp_path / "a.yaml", "task: {path: rows, validation_path: /data/v.parquet, other_path: s3://b/x}")
    files = JobFiles()
    files.add_config(config, "a.yaml")
    assert _sent(files, tmp_path / "sent") == {"a.yaml", "rows/part-0.parquet"}


def test_weights_to_begin_with_and_a_teacher_are_sent_without_the_checkpoints_of_their_runs(tmp_path: Path) -> None:
    for name in ("base", "teacher"):
        _write(tmp_path / f"runs/{name}/config.yaml", "x")
        _write(tmp_path / f"runs/{name}/model/model.safetensors", "x")
        _write(tmp_path / f"runs/{name}/checkpoints/step-00000001/state.json", "x")
    _write(tmp_path / "bert/config.json", "x")
    text = "train: {init_from: runs/base}\ndistill: {teacher: runs/teacher}\ntask: {model: bert, tokenizer: gpt2}"
    config = _write(tmp_path / "a.yaml", text)
    files = JobFiles()
    files.add_config(config, "a.yaml")
    models = {
        f"runs/{name}/{file}" for name in ("base", "teacher") for file in ("config.yaml", "model/model.safetensors")
    }
    assert _sent(files, tmp_path / "sent") == {"a.yaml", "bert/config.json", *models}


def test_data_in_folders_named_as_those_of_a_run_is_sent(tmp_path: Path) -> None:
    inside = {f"cars/{name}/1.png" for name in ("model", "checkpoints")} | {"cars/old/checkpoints/2.png"}
    for path in inside:
        _write(tmp_path / path, "x")
    files = JobFiles()
    files.add_config(_write(tmp_path / "a.yaml", "task: {path: cars}"), "a.yaml")
    assert _sent(files, tmp_path / "sent") == {"a.yaml", *inside}


def test_linked_folders_are_sent_and_what_would_hide_files_from_ray_is_not(tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere/2.png", "x")
    _write(tmp_path / "project/photos/cat/1.png", "x")
    _write(tmp_path / "project/photos/.gitignore", "*")
    _write(tmp_path / "project/photos/cat/.rayignore", "*")
    (tmp_path / "project/photos/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "project/photos/cat/round").symlink_to(tmp_path / "project/photos")
    _write(tmp_path / "project/own.py", "import parts")
    _write(tmp_path / "project/parts/__init__.py", "x")
    _write(tmp_path / "project/parts/.gitignore", "*.txt")
    _write(tmp_path / "project/parts/words.txt", "x")
    (tmp_path / "project/parts/pictures").symlink_to(tmp_path / "elsewhere")
    config = _write(tmp_path / "project/a.yaml", "task: {type: own.py:Own, path: photos}")
    files = JobFiles()
    files.add_config(config, "a.yaml")
    data = {"photos/cat/1.png", "photos/dog/2.png"}
    code = {"own.py", "parts/__init__.py", "parts/words.txt", "parts/pictures/2.png"}
    assert _sent(files, tmp_path / "sent") == {"a.yaml", *data, *code}


def test_every_problem_with_what_is_to_be_sent_is_named(tmp_path: Path) -> None:
    config = _write(tmp_path / "a.yaml", "task: {path: missing.parquet}\ncheckpoint: {storage: saved}")
    files = JobFiles()
    files.add_config(config, "a.yaml")
    with pytest.raises(ConfigError) as caught:
        files.check()
    data, storage = caught.value.problems
    assert data.startswith("a.yaml: task.path: there is no missing.parquet here")
    assert storage.startswith("a.yaml: checkpoint.storage: 'saved' would be inside the job's own files")


def test_too_much_data_is_refused_with_its_size_and_largest_file(tmp_path: Path) -> None:
    config = _write(tmp_path / "a.yaml", "task: {path: big.parquet}")
    with (tmp_path / "big.parquet").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    files = JobFiles()
    files.add_config(config, "a.yaml")
    with pytest.raises(ConfigError, match=r"have 105 MB, at most 105 MB .*big\.parquet.*s3://"):
        files.check()


def test_override_with_a_task_file_is_sent_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _write(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    files = JobFiles()
    assert files.add_override("task.type=mine.py:Mine") == task
    assert files.add_override("train.epochs=3") is None
    assert files.add_override("name=mine.py") is None
    assert files.paths == {task}


def test_package_is_sent_as_plain_files_that_a_python_can_import(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    assert package == tmp_path / "orchestray"
    paths = list(package.rglob("*"))
    assert package / "cli" / "app.py" in paths
    assert not [path for path in paths if path.is_symlink() or "__pycache__" in path.parts]
    assert not (package / "platform" / "__init__.py").exists()


def test_entrypoint_hands_every_word_through_the_shell_unchanged(tmp_path: Path) -> None:
    fake = _write(tmp_path / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    words = ["train", "a b.yaml", "task.x={'y': \"$HOME\"}", "--name", "it's"]
    line = entrypoint(words, "some runs")
    done = subprocess.run(
        # Through a second shell: the entrypoint asks its parent for the interpreter of a Ray worker, as pytest may be.
        ["/bin/sh", "-c", '/bin/sh -c "$1"; exit $?', "sh", line],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/some one"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = ["-m", "orchestray.cli.app", *words, "--runs-dir", "/home/some one/some runs"]
    assert done.stdout.splitlines() == expected


def test_absolute_runs_directory_is_taken_as_it_is() -> None:
    assert shlex.split(entrypoint(["train"], "/shared/runs"))[-2:] == ["--runs-dir", "/shared/runs"]
    assert "--runs-dir" not in entrypoint(["validate"], None)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://head:8265/", "http://head:8265"),
        ("head:8265", "http://head:8265"),
        ("https://ray.example.org/team", "https://ray.example.org/team"),
    ],
)
def test_address_of_a_job_server(given: str, url: str) -> None:
    assert job_address(given) == url


@pytest.mark.parametrize("given", ["auto", "ray://head:10001", "http://", "http://head:port", "local"])
def test_other_addresses_are_refused_saying_what_one_looks_like(given: str) -> None:
    with pytest.raises(ConfigError, match=r"not that of a job server.*http://HOST:8265"):
        job_address(given)


def test_log_read_a_second_time_goes_on_where_the_first_reading_broke_off() -> None:
    pieces: list[str] = []
    shown = Shown(pieces.append)
    shown.show("one\n", 0)
    shown.show("two\n", 4)
    shown.show("one\n", 0)
    shown.show("two\nthree\n", 4)
    shown.show_from_start("one\ntwo\nthree\nfour\n")
    assert "".join(pieces) == "one\ntwo\nthree\nfour\n"


_LINES_OF_RAY = (
    "2026-11-21 10:30:45,852\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
    'Running entrypoint for job raysubmit_BzDF1XTZhrKFqki1: p=$(sed); exec "$p" -m orchestray.cli.app\n'
)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("own", ["", "no newline", "ok\nRunning entrypoint for job x: is said again\n"])
def test_log_begins_with_what_the_job_says_in_whatever_pieces_it_comes(own: str, piece: int) -> None:
    text, pieces = _LINES_OF_RAY + own, list[str]()
    body = Body(pieces.append)
    for begin in range(0, len(text), piece):
        body.write(text[begin : begin + piece])
    body.end()
    assert "".join(pieces) == own


def test_log_is_handed_on_as_it_comes_once_the_job_has_begun() -> None:
    pieces: list[str] = []
    body = Body(pieces.append)
    body.write(_LINES_OF_RAY + "step 1\nste")
    body.write("p 2")
    assert pieces == ["step 1\nste", "p 2"]


@pytest.mark.parametrize(
    ("status", "driver_exit_code", "expected"),
    [
        ("succeeded", 0, 0),
        ("failed", 2, 2),
        ("failed", -9, 137),
        ("failed", None, None),
        ("stopped", None, 130),
        ("running", None, None),
    ],
)
def test_exit_status_is_that_of_the_command(status: str, driver_exit_code: int | None, expected: int | None) -> None:
    assert exit_status_of(status, driver_exit_code) == expected

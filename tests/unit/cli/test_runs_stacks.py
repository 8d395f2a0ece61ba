"""`orchestray runs stacks`: the processes of a live run are read from another shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.directory import RunDirectory, writer_of
from orchestray.trainers.config.load import dump_yaml, load_train_config
from support.cli import orchestray_here as orchestray

CONFIG: dict[str, Any] = {
    "name": "digits",
    "task": {"type": "digits"},
    "train": {"batch_size": 16, "epochs": 2, "optimizer": {"type": "sgd", "lr": 0.1}},
}
CODE = "def lost_in_thought():\n    print('there', flush=True)\n    input()\nlost_in_thought()"


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is named as a worker of Ray."""
    command = ["ray::Member", "-c", CODE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path, "digits") as directory:
        directory.write_config(dump_yaml(load_train_config(CONFIG)))
        yield directory


def test_all_processes_of_a_live_run_are_read_and_those_of_other_machines_named(
    run: RunDirectory, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = {"role": "worker", "rank": 0, "pid": worker.pid, "node": "127.0.0.1"}
    elsewhere = {"role": "parameter_server", "rank": 1, "pid": worker.pid, "node": "203.0.113.9"}
    reused = {"role": "worker", "rank": 1, "pid": os.getpid(), "node": "127.0.0.1"}
    run.write_actors([here, elsewhere, reused])
    done = orchestray("runs", "stacks", "digits", "--runs-dir", run.path.parent, "--json")
    assert done.returncode == 0, done.stderr
    driver, *others = json.loads(done.stdout)
    assert (driver["role"], driver["pid"]) == ("driver", os.getpid())
    assert "lost_in_thought (" in others[0]["stacks"]
    assert others[1]["stacks"].startswith("It runs on 203.0.113.9: run this command there, or give the Ray cluster")
    assert others[2]["stacks"] == "It has ended.\n"  # the process that has its number is not a worker
    done = orchestray("runs", "stacks", "digits", "--runs-dir", run.path.parent)
    assert f"== worker 0 (process {worker.pid}, node 127.0.0.1)\n" in done.stdout
    assert "== parameter server 1 (" in done.stdout


def test_a_run_that_is_over_is_refused(run: RunDirectory) -> None:
    assert writer_of(run.path) == os.getpid()
    link = run.path.parent.with_name("link")
    link.symlink_to(run.path.parent)
    assert writer_of(link / run.name) == os.getpid()
    run.close()
    assert writer_of(run.path) is None
    done = orchestray("runs", "stacks", "digits", "--runs-dir", run.path.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Run 'digits' has no processes whose stacks could be read: its status is died.\n"

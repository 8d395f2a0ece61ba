"""Commands as jobs on a real Ray cluster of two local nodes, as a user types them."""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from orchestray.platform.jobs import address as job_server
from support.cli import COMMAND, TIMEOUT_S, orchestray_here, outside
from support.cli import orchestray as run_command
from support.machines import Machines

_CONFIG = """\
name: mine
task: {{type: ../tasks/mine.py:Mine}}
train: {{batch_size: 32, steps: {steps}, optimizer: {{type: sgd, lr: 0.1}}}}
strategy: {{network: {{data: {workers}}}}}
resources: {{cpus_per_worker: {cpus}}}
"""

_TASK = """\
import torch
from torch import nn

from points import table


class Mine:
    def build_model(self):
        return nn.Linear(4, 2)

    def dataset(self, split):
        return table()

    def to_batch(self, columns):
        inputs = [torch.tensor(columns[f"x{i}"].to_pylist(), dtype=torch.float32) for i in range(4)]
        return {"inputs": torch.stack(inputs, dim=1), "targets": torch.tensor(columns["label"].to_pylist())}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).float().mean()}
"""

_POINTS = """\
import numpy as np
import pyarrow as pa


def table():
    points = np.random.default_rng(0).normal(size=(256, 4))
    return pa.table({**{f"x{i}": points[:, i] for i in range(4)}, "label": (points.sum(axis=1) > 0).astype(np.int64)})
"""


@dataclass(frozen=True)
class User:
    """A user with a terminal, a home directory and the token of the cluster."""

    home: Path
    environment: dict[str, str]

    def types(self, *arguments: str | Path, **environment: str) -> CompletedProcess[str]:
        return run_command(*arguments, cwd=self.home, env={**self.environment, **environment})

    @contextlib.contextmanager
    def begins(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        """Yield a command that is under way; it is killed if it is still there at the end."""
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=self.home,
            env={**outside(), **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def jobs(self) -> dict[str, str]:
        """Return the status of every job by its id."""
        return {job["id"]: job["status"] for job in json.loads(self.types("jobs", "list", "--json").stdout)}


@pytest.fixture
def away(machines: Machines) -> Path:
    """Return the home directory on the cluster."""
    return machines.away


@pytest.fixture
def nobody(tmp_path: Path) -> User:
    """Return a user without a cluster and without a token."""
    nowhere = dict.fromkeys(("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), "")
    return User(tmp_path, {**nowhere, "RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path)})


@pytest.fixture
def project(nobody: User) -> User:
    """Return a user with a project."""
    for name, text in {
        "conf/mine.yaml": _CONFIG.format(steps=20, workers=2, cpus=2),  # one worker on each machine
        "conf/endless.yaml": _CONFIG.format(steps=100_000_000, workers=1, cpus=1),
        "tasks/mine.py": _TASK,
        "tasks/own.py": _TASK.replace("from points", "from tasks.points"),
        "tasks/points.py": _POINTS,
        "tasks/unneeded.py": "",
    }.items():
        path = nobody.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return nobody


@pytest.fixture
def user(project: User, machines: Machines) -> User:
    """Return a user with a project, and with a token but without RAY_AUTH_MODE."""
    found = {"RAY_API_SERVER_ADDRESS": machines.http_address, **machines.token}
    return User(project.home, project.environment | found)


def test_what_a_job_did_is_followed_and_listed_and_its_runs_are_in_the_home_directory_there(
    user: User, away: Path
) -> None:
    """One job trains a module of its working directory on two nodes, the other fails."""
    whole = ("--working-dir", ".", "train", "conf/mine.yaml", "task.type=tasks.own:Mine", "--name", "two-nodes")
    done = user.types("submit", "--follow", *whole)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its runs go to ~/orchestray-runs there" in done.stderr
    result = json.loads((away / "orchestray-runs/two-nodes/result.json").read_text())
    assert (result["status"], result["steps"]) == ("succeeded", 20)
    trained = done.stderr.split()[1]

    submitted = user.types("submit", "train", "conf/mine.yaml", "train.seed=7", "--name", "two-nodes")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.rstrip("\n").rpartition("\n")[2]
    followed = user.types("jobs", "logs", "--follow", job_id)
    assert (followed.returncode, "'two-nodes'" in followed.stdout) == (2, True), followed.stdout
    assert user.types("jobs", "logs", job_id).stdout == followed.stdout
    jobs = user.jobs()
    assert (jobs[trained], jobs[job_id]) == ("succeeded", "failed")
    table = user.types("jobs", "list", COLUMNS="200").stdout
    listed = [line.split()[:3] for line in table.splitlines() if trained in line or job_id in line]
    assert listed == [[job_id, "failed", "2"], [trained, "succeeded", "0"]]
    assert "train conf/mine.yaml train.seed=7" in table
    for verb in ("logs", "stop"):
        done = user.types("jobs", verb, "raysubmit_nobody")
        assert done.returncode == 2
        assert "There is no job 'raysubmit_nobody'" in done.stderr
        assert job_id in done.stderr


@pytest.mark.slow
def test_interrupting_a_follower_leaves_the_job_running_and_stopping_it_saves_a_checkpoint_and_ends_followers_with_130(
    user: User, away: Path
) -> None:
    with user.begins("submit", "--follow", "train", "conf/endless.yaml", "--runs-dir", "kept") as follower:
        _read_until_it_trains(follower)
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=TIMEOUT_S)
    job_id = said.split()[1]
    try:
        assert follower.returncode == 130
        assert f"Job {job_id} goes on." in said
        assert f"`orchestray jobs stop {job_id}`" in said
        assert user.jobs()[job_id] == "running"
        with user.begins("jobs", "logs", "--follow", job_id) as another:
            _read_until_it_trains(another)
            stopped = user.types("jobs", "stop", job_id)
            assert (stopped.returncode, stopped.stdout) == (0, f"Job {job_id} has been stopped.\n"), stopped.stderr
            assert another.wait(TIMEOUT_S) == 130
    finally:  # whatever happened: the next test needs the place
        again = user.types("jobs", "stop", job_id)
    assert (again.returncode, again.stdout) == (
        0,
        f"Job {job_id} has been stopped already; there is nothing to stop.\n",
    )
    assert user.jobs()[job_id] == "stopped"
    assert json.loads((away / "kept/mine/result.json").read_text())["status"] == "interrupted"
    assert list((away / "kept/mine/checkpoints").glob("step-*/state.json"))


def test_wrong_config_or_arguments_end_here_and_no_server_is_asked(
    project: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.home)
    # Nobody answers there: a command that asks ends with another status.
    for name, value in (project.environment | {job_server.ADDRESS_VARIABLE: "http://127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    done = orchestray_here("submit", "train", "conf/mine.yaml", "train.epoch=3", "train.seed=x")
    assert done.returncode == 2
    assert {line.split(": ")[1] for line in done.stderr.splitlines()} == {"train.seed", "train.epoch"}
    for arguments, sentence in (
        (("train", "conf/mine.yaml", "--fast"), "No such option: --fast"),
        (("trian", "conf/mine.yaml"), "No such command 'trian'"),
        (("jobs", "list"), "cannot run as a job"),
        (("train", "conf/mine.yaml", "--follow"), "--follow belongs to `submit`"),
        (("train", "conf/mine.yaml", "checkpoint.storage=saved"), "would be inside the job's own files"),
    ):
        done = orchestray_here("submit", *arguments)
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr


def test_token_that_is_missing_or_another_is_asked_for(user: User, tmp_path: Path) -> None:
    missing = user.types("jobs", "list", RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert (missing.returncode, "asks for a token, and there is none here" in missing.stderr) == (1, True)
    other = user.types("jobs", "list", RAY_AUTH_TOKEN="ab" * 32)
    assert (other.returncode, "has another token than the one found here" in other.stderr) == (1, True)
    switched_off = user.types("jobs", "list", RAY_AUTH_MODE="disabled")
    assert (switched_off.returncode, "RAY_AUTH_MODE is 'disabled' here" in switched_off.stderr) == (1, True)


@pytest.mark.parametrize("command", [("submit", "systems"), ("jobs", "list"), ("jobs", "logs", "x")])
def test_without_an_address_the_sentence_says_how_to_give_one(nobody: User, command: tuple[str, ...]) -> None:
    done = nobody.types(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("No cluster is named. Give the address of its dashboard, --address http://HOST:8265")
    assert "Traceback" not in done.stderr


def test_address_that_does_not_answer_ends_with_a_sentence(nobody: User, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nobody.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_server, "_ANSWER_TIMEOUT_S", 0.5)  # a longer wait shows nothing more
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never says a word
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = orchestray_here("submit", "--address", address, "systems")
        assert (done.returncode, f"No Ray job server answers at {address} (timed out)" in done.stderr) == (1, True)
    done = nobody.types("submit", "--address", address, "systems")
    assert (done.returncode, "Connection refused" in done.stderr) == (1, True)


def test_address_of_another_server_is_told_from_a_job_server(nobody: User, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        done = nobody.types("submit", "--address", f"127.0.0.1:{server.server_port}", "systems")
        server.shutdown()
    assert (done.returncode, "is not Ray's job server: it answered 404" in done.stderr) == (1, True), done.stderr


def _read_until_it_trains(follower: subprocess.Popen[str]) -> None:
    """Read the log until a training prints its first progress line."""
    assert follower.stdout is not None
    seen = []
    for line in follower.stdout:
        seen.append(line)
        if "step " in line:
            return
    raise AssertionError("the log ended before the training began:\n" + "".join(seen))

"""Commands as jobs on a real Ray cluster of two local nodes, as a user types them."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.cli import COMMAND, TIMEOUT_S, outside
from support.cli import orchestray as run_command
from support.ray_cluster import RayCluster, ray_cluster

_CONFIG = """\
name: mine
task: {{type: ../tasks/mine.py:Mine}}
train: {{batch_size: 32, steps: {steps}, optimizer: {{type: sgd, lr: 0.1}}}}
strategy: {{network: {{data: 2}}}}
resources: {{cpus_per_worker: 2}}
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
    """Somebody with a terminal, a home directory and the token of the cluster."""

    home: Path
    environment: dict[str, str]

    def types(self, *arguments: str | Path, **environment: str) -> CompletedProcess[str]:
        return run_command(*arguments, cwd=self.home, env={**self.environment, **environment})

    @contextlib.contextmanager
    def begins(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        """A command that is under way; killed if it is still there at the end."""
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
        """The status of every job by its id."""
        return {job["id"]: job["status"] for job in json.loads(self.types("jobs", "list", "--json").stdout)}


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory on the cluster."""
    return tmp_path_factory.mktemp("away")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "auth_token"
    path.write_text("5e" * 32, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cluster(away: Path, token_file: Path) -> Iterator[RayCluster]:
    """Two nodes with two CPUs each, a token, and no Python with Ray on their PATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    environment |= {"RAY_AUTH_TOKEN_PATH": str(token_file), "HOME": str(away), "PATH": "/usr/bin:/bin"}
    with ray_cluster(num_nodes=2, environment=environment) as started:
        yield started


@pytest.fixture
def nobody(tmp_path: Path) -> User:
    """Somebody without a cluster and without a token."""
    nowhere = dict.fromkeys(("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), "")
    return User(tmp_path, {**nowhere, "RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path)})


@pytest.fixture
def user(nobody: User, cluster: RayCluster, token_file: Path) -> User:
    """Somebody with a token, who told nobody to use it, and a project of his own."""
    for name, text in {
        "conf/mine.yaml": _CONFIG.format(steps=20),
        "conf/endless.yaml": _CONFIG.format(steps=100_000_000),
        "tasks/mine.py": _TASK,
        "tasks/points.py": _POINTS,
        "tasks/unneeded.py": "",
    }.items():
        path = nobody.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {"RAY_API_SERVER_ADDRESS": cluster.http_address, "RAY_AUTH_TOKEN_PATH": str(token_file)}
    return User(nobody.home, nobody.environment | found)


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def test_own_task_trains_on_two_nodes_and_leaves_its_run_in_the_home_directory_there(user: User, away: Path) -> None:
    done = user.types("submit", "--follow", "train", "conf/mine.yaml", "--name", "two-nodes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its runs go to ~/orchestray-runs there" in done.stderr
    result = json.loads((away / "orchestray-runs/two-nodes/result.json").read_text())
    assert (result["status"], result["steps"]) == ("succeeded", 20)


def test_exit_status_is_that_of_the_command_on_the_cluster(user: User, away: Path) -> None:
    (away / "orchestray-runs/taken").mkdir(parents=True)
    done = user.types("submit", "--follow", "train", "conf/mine.yaml", "--name", "taken")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "'taken'" in done.stdout


def test_job_id_is_the_last_line_and_leads_to_log_and_list(user: User) -> None:
    submitted = user.types("submit", "validate", "conf/mine.yaml", "train.seed=7")
    assert submitted.returncode == 0, submitted.stderr
    job_id = _last_line(submitted.stdout)
    followed = user.types("jobs", "logs", "--follow", job_id)
    assert (followed.returncode, "conf/mine.yaml: ok" in followed.stdout) == (0, True), followed.stdout
    assert user.types("jobs", "logs", job_id).stdout == followed.stdout
    assert user.jobs()[job_id] == "succeeded"
    table = user.types("jobs", "list", COLUMNS="200").stdout
    assert [line.split()[:3] for line in table.splitlines() if job_id in line] == [[job_id, "succeeded", "0"]]
    assert "validate conf/mine.yaml train.seed=7" in table


def test_stopping_a_training_saves_a_checkpoint_and_ends_its_followers_with_130(user: User, away: Path) -> None:
    job_id = _last_line(user.types("submit", "train", "conf/endless.yaml", "--runs-dir", "kept").stdout)
    with user.begins("jobs", "logs", "--follow", job_id) as follower:
        _read_until_it_trains(follower)
        stopped = user.types("jobs", "stop", job_id)
        assert (stopped.returncode, stopped.stdout) == (0, f"Job {job_id} has been stopped.\n"), stopped.stderr
        assert follower.wait(TIMEOUT_S) == 130
    assert user.jobs()[job_id] == "stopped"
    assert json.loads((away / "kept/mine/result.json").read_text())["status"] == "interrupted"
    assert list((away / "kept/mine/checkpoints").glob("step-*/state.json"))
    again = user.types("jobs", "stop", job_id)
    assert (again.returncode, again.stdout) == (
        0,
        f"Job {job_id} has been stopped already; there is nothing to stop.\n",
    )


def test_interrupting_a_follower_leaves_the_job_running_and_says_how_to_go_on(user: User) -> None:
    arguments = ("--follow", "train", "conf/endless.yaml", "--name", "left-alone")
    try:
        with user.begins("submit", *arguments) as follower:
            _read_until_it_trains(follower)
            follower.send_signal(signal.SIGINT)
            _, said = follower.communicate(timeout=TIMEOUT_S)
        assert follower.returncode == 130
        job_id = said.split()[1]
        assert f"Job {job_id} goes on." in said
        assert f"`orchestray jobs stop {job_id}`" in said
        assert user.jobs()[job_id] == "running"
    finally:  # whatever happened: the next test needs the place
        running = [each for each, status in user.jobs().items() if status == "running"]
        stopped = [user.types("jobs", "stop", each).returncode for each in running]
    assert stopped == [0]


def test_a_working_directory_is_sent_whole_and_its_modules_can_be_imported(user: User) -> None:
    where = ("--working-dir", ".", "train", "conf/mine.yaml")
    done = user.types("submit", "--follow", *where, "task.type=tasks.own:Mine", "--name", "lacking")
    assert done.returncode == 2, done.stdout
    (user.home / "tasks/own.py").write_text(_TASK.replace("from points", "from tasks.points"), encoding="utf-8")
    done = user.types("submit", "--follow", *where, "task.type=tasks.own:Mine", "--name", "whole")
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_job_is_refused_with_the_known_ones(user: User) -> None:
    job_id = _last_line(user.types("submit", "validate", "conf/mine.yaml").stdout)
    for verb in ("logs", "stop"):
        done = user.types("jobs", verb, "raysubmit_nobody")
        assert done.returncode == 2
        assert "There is no job 'raysubmit_nobody'" in done.stderr
        assert job_id in done.stderr


def test_wrong_config_or_arguments_end_here_and_nothing_is_submitted(user: User) -> None:
    before = user.jobs().keys()
    done = user.types("submit", "train", "conf/mine.yaml", "train.epoch=3", "train.seed=x")
    assert done.returncode == 2
    assert {line.split(": ")[1] for line in done.stderr.splitlines()} == {"train.seed", "train.epoch"}
    for arguments, sentence in (
        (("train", "conf/mine.yaml", "--fast"), "No such option: --fast"),
        (("trian", "conf/mine.yaml"), "No such command 'trian'"),
        (("jobs", "list"), "cannot run as a job"),
        (("train", "conf/mine.yaml", "--follow"), "--follow belongs to `submit`"),
        (("train", "conf/mine.yaml", "checkpoint.storage=saved"), "would be inside the job's own files"),
    ):
        done = user.types("submit", *arguments)
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert user.jobs().keys() == before


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


def test_address_that_does_not_answer_ends_with_a_sentence(nobody: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never says a word
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = nobody.types("submit", "--address", address, "systems")
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

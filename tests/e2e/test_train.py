"""`orchestray train` as a user types it: results, kills, resumes, interrupts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from orchestray import __version__, load_run
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import Running, beside, orchestray, orchestray_here, read_lines, template_of
from support.patience import PATIENCE_S
from support.slow_digits import slowly
from support.under_way import UnderWay

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
DIGITS = CONFIGS / "digits.yaml"
QUICK = ["train.epochs=2", "task.hidden=[16]"]
CHECKPOINT_EVERY = 40
WHOLE = ["train.epochs=8", "task.hidden=[16]", f"checkpoint.every_steps={CHECKPOINT_EVERY}"]
"""184 steps. A process is slow after 40: two can be killed in turn, and all after a checkpoint, before the end."""

Command = Callable[..., subprocess.CompletedProcess[str]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model_tensors(run / "model")


def assert_bit_identical(left: Path, right: Path) -> None:
    one, two = weights(left), weights(right)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run / "metrics.jsonl") if "split" not in line]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an uninterrupted run of two workers."""
    runs = tmp_path_factory.mktemp("whole")
    done = orchestray_here("train", DIGITS, *WHOLE, "--runs-dir", runs, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "succeeded"
    return runs / "digits"


def test_a_run_leaves_everything_the_contract_names(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["status"] == "succeeded"
    assert result["error"] is None
    assert (result["restarts"], result["goodput"]) == (0, 1.0)
    assert (result["versions"]["torch"], result["versions"]["orchestray"]) == (torch.__version__, __version__)
    assert result["epochs"] == 8
    assert result["final"]["validation"]["accuracy"] > 0.9
    assert result["bytes"]["sent"] > 0
    assert len(result["memory"]["peak_bytes"]) == 2
    assert [worker["shares"] for worker in result["workers"]] == [result["steps"]] * 2
    assert all(worker["busy_s"] > 0 and worker["waited_s"] > 0 for worker in result["workers"])
    assert [step for step, _ in losses(whole)] == list(range(1, result["steps"] + 1))
    assert json.loads((whole / "actors.json").read_text()) == []
    assert (whole / "model" / "model.safetensors").exists()
    assert any((whole / "tensorboard").iterdir())
    names = [line["event"] for line in read_lines(whole / "events.jsonl")]
    assert names[0] == "started"
    assert names[-1] == "finished"
    assert "checkpoint_saved" in names


def test_the_resolved_config_gives_the_same_run(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    done = orchestray_here("train", whole / "config.yaml", "--runs-dir", tmp_path, "--quiet")
    assert done.returncode == 0, done.stderr
    assert_bit_identical(whole, tmp_path / "digits")


def test_two_workers_learn_what_one_learns(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    done = orchestray_here("train", DIGITS, *WHOLE, "strategy.network.data=1", "--runs-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "digits"), weights(whole)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-4, msg=name)
    for (_, left), (_, right) in zip(losses(tmp_path / "digits")[:100], losses(whole)[:100], strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def start(runs: Path, *more: str, own_group: bool = False) -> tuple[Running, Path, list[str | Path]]:
    """Start a run that is slow once it has a checkpoint.

    Return it, the file to remove to end that, and its command.
    """
    slowed, slow = slowly(runs, CHECKPOINT_EVERY)
    command: list[str | Path] = ["train", DIGITS, *WHOLE, *slowed, "--runs-dir", runs]
    return Running([*command, *more], run_path=runs / "digits", own_group=own_group), slow, command


def begin(runs: Path, *more: str) -> tuple[UnderWay, Path]:
    """Begin the same run in this process, on workers that are there already."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY)
    return UnderWay(DIGITS, runs, [*WHOLE, *slowed, *more], name="digits"), slow


def test_sigkill_of_either_worker_of_a_replacement_and_of_all_changes_nothing_but_the_time(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path, "max_restarts=10")
    running.until("20 steps", lambda: running.steps() >= 20)
    for rank in (0, 1):
        running.kill(rank)
        until_recovered(running, rank + 1)
    events = [line["event"] for line in running.events() if line["event"] in {"worker_lost", "recovered"}]
    assert events == ["worker_lost", "recovered"] * 2

    first = running.kill(1)
    os.kill(
        running.until("a replacement", lambda: running.actors().get(1, first) != first and running.actors()[1]),
        signal.SIGKILL,
    )
    until_recovered(running, 3)

    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    for pid in running.until("both at work", lambda: two_alive(running)):
        os.kill(pid, signal.SIGKILL)
    slow.unlink()
    running.finish()
    assert running.events("recovered")[-1]["step"] > running.events("checkpoint_saved")[0]["step"]
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert load_run(tmp_path / "digits").result["restarts"] >= 5


def two_alive(running: UnderWay) -> list[int]:
    found = [pid for pid in running.actors().values() if psutil.pid_exists(pid)]
    return found if len(found) == 2 else []


def until_recovered(running: UnderWay, count: int) -> None:
    running.until(f"recovery {count}", lambda: len(running.events("recovered")) >= count)


def test_node_redundancy_a_warm_spare_takes_the_place_of_any_killed_worker(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path, "resources.spares=2")
    running.until("20 steps and the spares", lambda: running.steps() >= 20 and len(running.actors("spare")) == 2)
    for rank in (0, 1):
        spares = running.until("a spare", lambda: list(running.actors("spare").values()))
        running.kill(rank)
        until_recovered(running, rank + 1)
        assert running.actors()[rank] in spares
    slow.unlink()
    running.finish()
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert [event["spare"] for event in running.events("worker_replaced")] == [True, True]


def test_sigkill_of_the_driver_leaves_no_process_and_resumes_bit_identically(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow, command = start(tmp_path)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    family = psutil.Process(running.process.pid).children(recursive=True)
    family += [psutil.Process(pid) for pid in running.actors().values()]
    assert any(template_of(running) == process.parent() for process in family)
    running.signal(signal.SIGKILL)
    running.finish()
    slow.unlink()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert load_run(tmp_path / "digits").status == "died"
    done = orchestray_here(*command, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step" in done.stderr
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)


def test_sigterm_to_all_of_its_group_saves_a_checkpoint_exits_143_and_resumes(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """Send SIGTERM as timeout, a scheduler or systemd do: it is for the command alone, even if others get it too.

    Ctrl-C to the command alone is in test_layouts.py.
    """
    running, slow, command = start(tmp_path, "checkpoint.every_steps=100000", own_group=True)
    running.until("20 steps", lambda: running.steps() >= 20)
    family = psutil.Process(running.process.pid).children(recursive=True)
    os.killpg(running.process.pid, signal.SIGTERM)
    status, _, stderr = running.finish()
    slow.unlink()
    assert status == 143
    assert "with a checkpoint saved. Go on with --resume" in stderr
    assert "Traceback" not in stderr
    assert "lost" not in stderr
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    result = load_run(tmp_path / "digits").result
    assert result["status"] == "interrupted"
    assert len(list((tmp_path / "digits" / "checkpoints").iterdir())) == 1
    done = orchestray_here(*command, "--resume")
    assert done.returncode == 0, done.stderr
    assert_bit_identical(whole, tmp_path / "digits")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["strategy.exchange.type=parameter_server", "engine=ray_train"])
def test_sigterm_saves_a_checkpoint_and_exits_143_under_servers_and_in_ray_train_too(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    slowed, slow = slowly(tmp_path, quick=5)
    command = ["train", DIGITS, *QUICK, "checkpoint.every_steps=100000", how, *slowed, "--runs-dir", tmp_path]
    running = Running(command, run_path=tmp_path / "digits", env=beside(cluster))
    running.until("5 steps", lambda: running.steps() >= 5)
    running.signal(signal.SIGTERM)
    status, _, stderr = running.finish()
    slow.unlink()
    assert status == 143, stderr
    assert "with a checkpoint saved. Go on with --resume" in stderr
    assert load_run(tmp_path / "digits").status == "interrupted"
    (saved,) = (tmp_path / "digits" / "checkpoints").iterdir()
    done = orchestray_here(*command, "--resume")
    assert done.returncode == 0, done.stderr
    step = int(saved.name.rpartition("-")[2])
    assert 5 <= step < 46
    assert f"going on from the checkpoint of step {step}" in done.stderr
    assert [step for step, _ in losses(tmp_path / "digits")] == list(range(1, 47))


def test_a_finished_run_resumed_with_nothing_left_prints_its_result(whole: Path, cluster: Cluster) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    done = orchestray_here("train", whole / "config.yaml", "--runs-dir", whole.parent, "--resume", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads((whole / "result.json").read_text())
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_goes_on_with_other_workers_from_checkpoints_in_their_old_place_or_without_its_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    def train(place: str, run: Command, *more: str) -> subprocess.CompletedProcess[str]:
        storage = f"checkpoint.storage={tmp_path / place}"
        return run("train", DIGITS, *QUICK, storage, "--runs-dir", tmp_path, *more)

    (tmp_path / "digits").mkdir()  # by a start that ended before it had written its config
    first = train("one", orchestray_here, "--resume")
    assert first.returncode == 0, first.stderr
    before = losses(tmp_path / "digits")
    longer = ("train.epochs=3", "strategy.network.data=1", "--resume")
    # Nobody answers there: the run stays what it is.
    died = train("two", orchestray, *longer, "--address", "127.0.0.1:1")
    assert died.returncode == 1, died.stderr
    assert load_run(tmp_path / "digits").result["epochs"] == 2
    again = train("two", orchestray_here, *longer)
    assert again.returncode == 0, again.stderr
    assert "going on from the checkpoint of step 46" in again.stderr
    assert losses(tmp_path / "digits")[:46] == before
    assert [step for step, _ in losses(tmp_path / "digits")] == list(range(1, 70))
    assert load_run(tmp_path / "digits").result["epochs"] == 3
    shutil.rmtree(tmp_path / "digits")  # with its machine
    other = train("two", orchestray_here, *longer, "train.batch_size=32")
    assert other.returncode == 2, other.stderr
    assert "a resumed run may not change train.batch_size (was 64, now 32)" in other.stderr
    shutil.rmtree(tmp_path / "digits")
    last = train("two", orchestray_here, *longer, "train.epochs=4")
    assert last.returncode == 0, last.stderr
    assert "going on from the checkpoint of step 69" in last.stderr
    steps = [step for step, _ in losses(tmp_path / "digits")]
    assert steps == list(range(steps[0], 93))
    assert steps[0] <= 70, "a checkpoint has the lines of the last steps before it"
    assert load_run(tmp_path / "digits").result["epochs"] == 4


def test_the_model_of_a_run_is_loaded_and_answers(whole: Path) -> None:
    run = load_run(whole)
    task: Any = run.load_task()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        outputs = run.load_model()(batch["inputs"])
    accuracy = float(task.metrics(outputs, batch)["accuracy"])
    assert accuracy == pytest.approx(run.result["final"]["validation"]["accuracy"], abs=1e-6)


HUNGRY = """
import time
from pathlib import Path

import numpy as np

from orchestray.trainers.tasks.digits import Digits


class Hungry(Digits):
    def __init__(self, marker, num_bytes, **digits):
        super().__init__(**digits)
        self._marker, self._num_bytes = Path(marker), num_bytes

    def loss(self, outputs, batch):
        if self._marker.exists():
            self._marker.unlink()
            held = np.ones(self._num_bytes, dtype=np.uint8)
            time.sleep(600)
            del held
        return super().loss(outputs, batch)
"""


def test_a_worker_that_ray_kills_because_memory_runs_out_is_replaced_and_the_cause_is_told(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    (tmp_path / "marker").touch()
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + 4 * 2**30) / memory.total
    task = {"type": f"{tmp_path}/hungry.py:Hungry", "marker": f"{tmp_path}/marker", "num_bytes": 8 * 2**30}
    done = orchestray(
        "train", DIGITS, "train.epochs=2", "strategy.network.data=1", *(f"task.{k}={v}" for k, v in task.items()),
        "--runs-dir", tmp_path,
        env={"RAY_memory_usage_threshold": f"{threshold:.3f}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lost = [line for line in read_lines(tmp_path / "digits" / "events.jsonl") if line["event"] == "worker_lost"]
    # At least one: what other programs of this machine take in the meantime counts as well, and may cost it another.
    assert lost
    assert all(line["cause"].startswith("its machine ran out of memory (") for line in lost)
    assert [step for step, _ in losses(tmp_path / "digits")] == list(range(1, 47))

"""`orchestray train` as a user types it: results, kills, resumes, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from orchestray import load_run
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.gang.pool import make_room
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import Running, orchestray, orchestray_here, read_lines
from support.patience import PATIENCE_S
from support.slow_digits import slowly
from support.under_way import UnderWay

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
DIGITS = CONFIGS / "digits.yaml"
QUICK = ["train.epochs=2", "task.hidden=[16]"]
CHECKPOINT_EVERY = 100
"""As the config has it."""

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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two workers."""
    runs = tmp_path_factory.mktemp("whole")
    done = orchestray("train", DIGITS, "train.epochs=20", "task.hidden=[16]", "--runs-dir", runs, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "succeeded"
    return runs / "digits"


def test_a_run_leaves_everything_the_contract_names(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["status"] == "succeeded"
    assert result["error"] is None
    assert result["restarts"] == 0
    assert result["epochs"] == 20
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
    done = orchestray_here(
        "train", DIGITS, "train.epochs=20", "task.hidden=[16]", "strategy.network.data=1", "--runs-dir", tmp_path
    )
    assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "digits"), weights(whole)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-4, msg=name)
    for (_, left), (_, right) in zip(losses(tmp_path / "digits")[:100], losses(whole)[:100], strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def start(runs: Path, *more: str, own_group: bool = False) -> tuple[Running, Path, list[str | Path]]:
    """A run that is slow once it has a checkpoint, the file to remove when it need no longer be, and its command."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY)
    command: list[str | Path] = ["train", DIGITS, "train.epochs=20", "task.hidden=[16]", *slowed, "--runs-dir", runs]
    return Running([*command, *more], run_path=runs / "digits", own_group=own_group), slow, command


def begin(runs: Path, *more: str) -> tuple[UnderWay, Path]:
    """The same in this process, on workers that are there already."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY)
    return UnderWay(DIGITS, runs, ["train.epochs=20", "task.hidden=[16]", *slowed, *more], name="digits"), slow


@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_of_a_worker_changes_nothing_but_the_time(
    whole: Path, cluster: Cluster, tmp_path: Path, rank: int
) -> None:
    running, slow = begin(tmp_path)
    running.until("50 steps", lambda: running.steps() >= 50)
    running.kill(rank)
    slow.unlink()
    running.finish()
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert load_run(tmp_path / "digits").result["restarts"] == 1
    events = [line["event"] for line in read_lines(tmp_path / "digits" / "events.jsonl")]
    assert events.index("worker_lost") < events.index("recovered") < events.index("finished")


def test_node_redundancy_a_warm_spare_takes_the_place_of_any_killed_worker(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path, "resources.spares=1")
    running.until("20 steps and the spare", lambda: running.steps() >= 20 and running.actors("spare"))
    spare = running.actors("spare")[0]
    running.kill(0)
    running.until("the spare at work", lambda: running.actors().get(0) == spare)
    slow.unlink()
    running.finish()
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert [event["spare"] for event in running.events("worker_replaced")] == [True]


def test_sigkill_of_all_workers_goes_on_from_the_last_checkpoint(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    running, slow = begin(tmp_path)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    for pid in running.actors().values():
        os.kill(pid, signal.SIGKILL)
    slow.unlink()
    running.finish()
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert load_run(tmp_path / "digits").result["restarts"] >= 1
    assert running.events("recovered")[0]["step"] > running.events("checkpoint_saved")[0]["step"]


def test_sigkill_of_a_replacement_before_it_has_met_is_survived_too(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path)
    running.until("50 steps", lambda: running.steps() >= 50)
    first = running.actors()[1]
    os.kill(first, signal.SIGKILL)
    os.kill(
        running.until("a replacement", lambda: running.actors().get(1, first) != first and running.actors()[1]),
        signal.SIGKILL,
    )
    slow.unlink()
    running.finish()
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)
    assert load_run(tmp_path / "digits").result["restarts"] == 2


def test_sigkill_of_the_driver_leaves_no_process_and_resumes_bit_identically(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    running, slow, command = start(tmp_path)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    family = psutil.Process(running.process.pid).children(recursive=True)
    family += [psutil.Process(pid) for pid in running.actors().values()]
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_a_checkpoint_exit_130_and_resume(
    whole: Path, cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    running, slow, command = start(tmp_path, "checkpoint.every_steps=100000")
    running.until("20 steps", lambda: running.steps() >= 20)
    family = psutil.Process(running.process.pid).children(recursive=True)
    running.signal(number)
    status, _, stderr = running.finish()
    slow.unlink()
    assert status == 130
    assert "with a checkpoint saved. Go on with --resume" in stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    result = load_run(tmp_path / "digits").result
    assert result["status"] == "interrupted"
    assert len(list((tmp_path / "digits" / "checkpoints").iterdir())) == 1
    done = orchestray_here(*command, "--resume")
    assert done.returncode == 0, done.stderr
    assert_bit_identical(whole, tmp_path / "digits")


def test_a_sigterm_to_all_of_the_command_s_group_is_the_command_s_alone(tmp_path: Path) -> None:
    overrides = ["checkpoint.every_steps=100000"]
    running, _, _ = start(tmp_path, *overrides, own_group=True)  # as by timeout, a scheduler, systemd
    running.until("20 steps", lambda: running.steps() >= 20)
    os.killpg(running.process.pid, signal.SIGTERM)
    status, _, stderr = running.finish()
    assert status == 130
    assert "with a checkpoint saved. Go on with --resume" in stderr
    assert "lost" not in stderr
    assert len(list((tmp_path / "digits" / "checkpoints").iterdir())) == 1


def test_a_finished_run_resumed_with_nothing_left_prints_its_result(whole: Path, cluster: Cluster) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    done = orchestray_here("train", whole / "config.yaml", "--runs-dir", whole.parent, "--resume", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads((whole / "result.json").read_text())
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_can_be_trained_for_longer_on_other_workers(cluster: Cluster, tmp_path: Path) -> None:
    first = orchestray_here("train", DIGITS, *QUICK, "--runs-dir", tmp_path)
    assert first.returncode == 0, first.stderr
    more = orchestray_here(
        "train", DIGITS, *QUICK, "train.epochs=3", "strategy.network.data=1", "--runs-dir", tmp_path, "--resume"
    )
    assert more.returncode == 0, more.stderr
    steps = [step for step, _ in losses(tmp_path / "digits")]
    assert steps == list(range(1, len(steps) + 1))
    assert load_run(tmp_path / "digits").result["epochs"] == 3


def test_a_run_goes_on_with_another_storage_for_its_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    first = orchestray_here("train", DIGITS, *QUICK, "--runs-dir", tmp_path)
    assert first.returncode == 0, first.stderr
    before = losses(tmp_path / "digits")
    more = orchestray_here(
        "train", DIGITS, *QUICK, "train.epochs=3", f"checkpoint.storage={tmp_path / 'elsewhere'}",
        "--runs-dir", tmp_path, "--resume",
    )  # fmt: skip
    assert more.returncode == 0, more.stderr
    assert "going on from the checkpoint of step 46" in more.stderr
    assert losses(tmp_path / "digits")[:46] == before
    assert list((tmp_path / "elsewhere" / "digits").iterdir())


def test_a_run_that_moved_its_checkpoints_twice_finds_the_oldest_place(cluster: Cluster, tmp_path: Path) -> None:
    def resume(place: str, run: Command, *more: str) -> subprocess.CompletedProcess[str]:
        storage = f"checkpoint.storage={tmp_path / place}"
        return run("train", DIGITS, *QUICK, "train.epochs=3", storage, "--runs-dir", tmp_path, "--resume", *more)

    first = orchestray_here("train", DIGITS, *QUICK, f"checkpoint.storage={tmp_path / 'one'}", "--runs-dir", tmp_path)
    assert first.returncode == 0, first.stderr
    died = resume(
        "two", orchestray, "--address", "127.0.0.1:1"
    )  # nobody answers there: nothing is saved in the new place
    assert died.returncode == 1, died.stderr
    again = resume("two", orchestray_here)
    assert again.returncode == 0, again.stderr
    assert "going on from the checkpoint of step 46" in again.stderr
    assert [step for step, _ in losses(tmp_path / "digits")] == list(range(1, 70))


def test_ray_train_runs_the_same_replicas(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    make_room(cluster)
    done = orchestray_here(
        "train", DIGITS, "train.epochs=20", "task.hidden=[16]", "engine=ray_train", "--runs-dir", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert_bit_identical(whole, tmp_path / "digits")
    assert losses(tmp_path / "digits") == losses(whole)


def test_the_model_of_a_run_is_loaded_and_answers(whole: Path) -> None:
    run = load_run(whole)
    task: Any = run.load_task()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        outputs = run.load_model()(batch["inputs"])
    accuracy = float(task.metrics(outputs, batch)["accuracy"])
    assert accuracy == pytest.approx(run.result["final"]["validation"]["accuracy"], abs=1e-6)

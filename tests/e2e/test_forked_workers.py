"""Workers that are forked: the results of plainly started ones, and nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import torch

from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import TIMEOUT_S, Running, orchestray, read_lines
from support.slow_digits import slowly

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
SHORT = ["task.hidden=[16]", "train.epochs=12"]


def template_of(running: Running) -> psutil.Process:
    (template,) = [
        child
        for child in psutil.Process(running.process.pid).children()
        if any(part.endswith("worker_template.py") for part in child.cmdline())
    ]
    return template


def same_bits(left: Path, right: Path) -> bool:
    one, two = load_model_tensors(left / "model"), load_model_tensors(right / "model")
    losses = [[line["loss"] for line in read_lines(run / "metrics.jsonl")] for run in (left, right)]
    return (
        losses[0] == losses[1] and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    )


def test_forked_workers_train_to_the_bits_of_plain_ones_and_a_run_outlives_the_template(tmp_path: Path) -> None:
    slowed, slow = slowly(tmp_path, quick=100)  # up to the checkpoint
    slow.unlink()
    command: list[str | Path] = ["train", DIGITS, *SHORT, *slowed, "--runs-dir", tmp_path, "--name"]
    plain = orchestray(*command, "plain", env={"ORCHESTRAY_FORK_WORKERS": "0"})
    assert plain.returncode == 0, plain.stderr
    slow.touch()
    running = Running([*command, "forked"], tmp_path / "forked")
    workers = running.until("two workers", lambda: len(running.actors()) == 2 and running.actors())
    template = template_of(running)
    assert {psutil.Process(process).ppid() for process in workers.values()} == {template.pid}
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    template.kill()
    os.kill(workers[1], signal.SIGKILL)
    slow.unlink()
    status, _, errors = running.finish()
    assert status == 0, errors
    assert len(running.events("recovered")) == 1
    assert same_bits(tmp_path / "plain", tmp_path / "forked")


def test_sigkill_of_the_driver_ends_the_template_and_all_that_it_has_forked(tmp_path: Path) -> None:
    long = ["task.hidden=[16]", "train.epochs=1000"]
    running = Running(["train", DIGITS, *long, "--runs-dir", tmp_path], tmp_path / "digits")
    running.until("a step", lambda: running.steps() >= 1)
    template = template_of(running)
    family = [template, *template.children(recursive=True)]
    assert len(family) > 2
    running.signal(signal.SIGKILL)
    running.finish()
    _, alive = psutil.wait_procs(family, timeout=TIMEOUT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []

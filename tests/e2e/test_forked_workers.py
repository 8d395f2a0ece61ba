"""Workers that are forked have the results of plainly started ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import Running, orchestray_here, read_lines, template_of
from support.slow_digits import slowly

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
CHECKPOINT_EVERY = 20
SHORT = ["task.hidden=[16]", "train.epochs=2", f"checkpoint.every_steps={CHECKPOINT_EVERY}"]


def same_bits(left: Path, right: Path) -> bool:
    one, two = load_model_tensors(left / "model"), load_model_tensors(right / "model")
    losses = [[line["loss"] for line in read_lines(run / "metrics.jsonl")] for run in (left, right)]
    return (
        losses[0] == losses[1] and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    )


@pytest.mark.slow
def test_a_run_outlives_the_template_and_a_worker_started_plainly_then_trains_to_the_bits_of_a_forked_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    slowed, slow = slowly(tmp_path, quick=CHECKPOINT_EVERY)
    slow.unlink()
    command: list[str | Path] = ["train", DIGITS, *SHORT, *slowed, "--runs-dir", tmp_path, "--name"]
    forked = orchestray_here(*command, "forked")
    assert forked.returncode == 0, forked.stderr
    slow.touch()
    running = Running([*command, "plain"], tmp_path / "plain")
    workers = running.until("two workers", lambda: len(running.actors()) == 2 and running.actors())
    template = template_of(running)
    assert {psutil.Process(process).ppid() for process in workers.values()} == {template.pid}
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    template.kill()
    os.kill(workers[1], signal.SIGKILL)
    (replacement,) = running.until("another", lambda: set(running.actors().values()) - set(workers.values()))
    assert psutil.Process(replacement).ppid() != template.pid
    slow.unlink()
    status, _, errors = running.finish()
    assert status == 0, errors
    assert same_bits(tmp_path / "plain", tmp_path / "forked")

"""Places of the processes of a run on a cluster of two machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestray.trainers.saved.run import load_run
from support.cli import Running, outside, python_path, read_lines
from support.machines import Machines
from support.patience import PATIENCE_S

_TESTS = Path(__file__).parents[1]
ADAM = Path(__file__).parents[2] / "configs" / "train" / "digits-project-adam.yaml"
ROLES = ("worker", "parameter_server")
PARTS = ("protocol.FactorCapture", "variants.model_parallel.StagedWorker", "durability.Replicator", "durability.Backup")


@pytest.mark.slow
def test_copies_of_a_shard_are_on_different_machines_and_leaf_servers_on_those_of_their_workers(
    machines: Machines,
) -> None:
    environment = {**outside(), "PYTHONPATH": python_path(_TESTS), **machines.token}
    command = [sys.executable, "-m", "support.placements", machines.gcs_address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    servers = found["parameter_server"]  # 2 shards, 2 copies of each
    assert servers[0] != servers[2]
    assert servers[1] != servers[3]
    workers = found["worker"]
    assert len(set(workers)) == 2
    assert [found["leaf_server"][group] for group in found["groups"]] == workers


@pytest.mark.slow
def test_project_adam_has_the_stages_of_a_replica_on_one_machine_and_copies_of_a_server_on_different_ones(
    machines: Machines, tmp_path: Path
) -> None:
    run = tmp_path / "adam"
    arguments = ["train", ADAM, "train.epochs=3", "--runs-dir", tmp_path, "--name", "adam"]
    running = Running([*arguments, "--address", machines.gcs_address], run, env=machines.token)
    running.until("a step", lambda: running.steps() >= 1)
    there = machines.workers()
    stages, servers = ({rank: there[pid] for rank, pid in running.actors(role).items()} for role in ROLES)
    status, _, stderr = running.finish()
    assert status == 0, stderr
    assert stages[0] == stages[1] != stages[2] == stages[3]  # two replicas of two stages, on machines of two CPUs
    assert servers[0] != servers[2]
    assert servers[1] != servers[3]  # 2 shards, 2 copies of each
    result = load_run(run).result
    assert {f"trainers.ps.{name}" for name in PARTS} <= set(result["parts"])
    losses = [line["loss"] for line in read_lines(run / "metrics.jsonl") if "split" not in line]
    assert len(losses) == 135
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert result["bytes"]["sent"] < result["bytes"]["dense"]  # inputs and errors are less than gradients

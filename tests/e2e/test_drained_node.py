"""A machine that is announced to leave the cluster: its workers move elsewhere before it is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from orchestray.trainers.saved.run import load_run
from support.cli import Running, read_lines
from support.machines import NUM_CPUS
from support.slow_digits import slowly

if TYPE_CHECKING:
    from support.machines import Machines

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"


@pytest.mark.slow
def test_the_worker_of_a_drained_machine_moves_to_another_with_a_checkpoint_and_no_step_is_lost(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add_node(num_cpus=NUM_CPUS)  # one machine is free
    slowed, slow = slowly(tmp_path, quick=5)
    apart = f"resources.cpus_per_worker={NUM_CPUS}"
    arguments = ["train", DIGITS, "train.epochs=3", "task.hidden=[16]", apart, *slowed, "--runs-dir", tmp_path]
    run = tmp_path / "digits"
    running = Running([*arguments, "--address", machines.gcs_address], run, env=machines.token)
    running.until("5 steps", lambda: running.steps() >= 5)
    before, nodes = running.actors(), machines.workers()
    rank = next(rank for rank in (0, 1) if nodes[before[rank]] != machines.head)
    machines.drain(nodes[before[rank]])
    running.until("it has moved", lambda: running.actors().get(rank, before[rank]) != before[rank])
    after = running.actors()
    assert machines.workers()[after[rank]] not in {nodes[pid] for pid in before.values()}
    slow.unlink()
    status, _, stderr = running.finish()
    machines.kill_drained()
    assert status == 0, stderr
    assert not psutil.pid_exists(before[rank])
    assert after[1 - rank] == before[1 - rank], "the other keeps its process"
    events = read_lines(run / "events.jsonl")
    assert [event["ranks"] for event in events if event["event"] == "node_draining"] == [[rank]]
    assert "worker_lost" not in {event["event"] for event in events}
    result = load_run(run).result
    assert (result["restarts"], result["steps"]) == (0, 69)
    assert result["goodput"] < 1
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, 70))


@pytest.mark.slow
def test_under_servers_those_of_a_drained_machine_move_and_all_go_on_from_the_checkpoint_of_the_moment(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add_node(num_cpus=NUM_CPUS)  # one machine is free
    slowed, slow = slowly(tmp_path, quick=5)
    places = [f"resources.cpus_per_worker={NUM_CPUS}", "checkpoint.every_steps=1000"]
    exchange = {"type": "parameter_server", "shards": 2, "replicas": 2, "groups": 2}
    servers = [f"strategy.exchange={json.dumps(exchange)}"]
    arguments = ["train", DIGITS, "train.epochs=3", "task.hidden=[16]", *places, *servers, *slowed]
    run = tmp_path / "digits"
    running = Running([*arguments, "--runs-dir", tmp_path, "--address", machines.gcs_address], run, env=machines.token)
    running.until("5 steps", lambda: running.steps() >= 5)
    before, nodes = running.actors(), machines.workers()
    rank = next(rank for rank in (0, 1) if nodes[before[rank]] != machines.head)
    drained = nodes[before[rank]]
    machines.drain(drained)
    running.until("it has moved", lambda: running.actors().get(rank, before[rank]) != before[rank])
    running.until("it goes on", lambda: running.events("recovered"))
    there = machines.workers()
    roles = ("worker", "parameter_server", "leaf_server")
    everybody = [pid for role in roles for pid in running.actors(role).values()]
    slow.unlink()
    status, _, stderr = running.finish()
    machines.kill_drained()
    assert status == 0, stderr
    assert len(everybody) == 8
    assert drained not in {there[pid] for pid in everybody}
    events = read_lines(run / "events.jsonl")
    assert ("worker", [rank]) in [(event["role"], event["ranks"]) for event in running.events("node_draining")]
    assert "worker_lost" not in {event["event"] for event in events}
    assert running.events("checkpoint_saved"), "the only one before the end is that of the move"
    result = load_run(run).result
    assert (result["restarts"], result["steps"]) == (0, 69)
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, 70))


@pytest.mark.slow
def test_ray_trains_workers_begin_again_elsewhere_from_a_checkpoint_of_the_moment_and_no_loss_is_counted(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add_node(num_cpus=NUM_CPUS)  # one machine is free
    slowed, slow = slowly(tmp_path, quick=5)
    options = [f"resources.cpus_per_worker={NUM_CPUS}", "checkpoint.every_steps=1000", "engine=ray_train"]
    arguments = ["train", DIGITS, "train.epochs=3", "task.hidden=[16]", "max_restarts=0", *options, *slowed]
    run = tmp_path / "digits"
    running = Running([*arguments, "--runs-dir", tmp_path, "--address", machines.gcs_address], run, env=machines.token)
    running.until("5 steps", lambda: running.steps() >= 5)
    before, nodes = running.actors(), machines.workers()
    rank = next(rank for rank in (0, 1) if nodes[before[rank]] != machines.head)
    machines.drain(nodes[before[rank]])
    running.until("others are there", lambda: len(now := running.actors()) == 2 and now[rank] != before[rank])
    there = machines.workers()
    after = {there[pid] for pid in running.actors().values()}
    slow.unlink()
    status, _, stderr = running.finish()
    machines.kill_drained()
    assert status == 0, stderr
    assert nodes[before[rank]] not in after
    assert [event["ranks"] for event in running.events("node_draining")] == [[rank]]
    assert running.events("worker_lost") == []
    assert running.events("checkpoint_saved"), "the only one before the end is that of the move"
    result = load_run(run).result
    assert (result["restarts"], result["steps"]) == (0, 69)
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, 70))

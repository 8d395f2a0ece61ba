"""The survey's parameter servers, by its own checks: workers and servers as threads, one worker moving at a time where
the order matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.channel import thread_pair
from orchestray.trainers.ps.durability.persistence import DiskLog, restore
from orchestray.trainers.ps.durability.replication import Backup, Replicator
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.partition import ALIGNMENT, FlatModel, Partition
from support import central_run
from support.central import (
    Plan,
    Schedule,
    Servers,
    Worker,
    make_data,
    make_model,
    run_all,
    spawn,
    train_central,
)
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits, same_bits

torch.set_num_threads(1)

SGD = {"type": "sgd"}


def loss_of(values: Tensor) -> float:
    """Return the mean loss over all samples."""
    model = make_model()
    FlatModel(model).values.copy_(values)
    inputs, targets = make_data()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(inputs), targets))


@pytest.mark.parametrize("seed", range(2))
def test_asynchronous_sgd_makes_n_updates_a_step_and_learns_beside_a_straggler(seed: int) -> None:
    plan = Plan("asynchronous", num_workers=4, shards=2, steps=30, optimizer=SGD, lr=0.02)
    schedule = Schedule(plan, seed, straggler=0)
    before = loss_of(schedule.servers.values())
    staleness = schedule.run()
    assert len(staleness) == 4 * plan.steps
    assert [machine.shard.version for machine in schedule.servers.machines] == [4 * plan.steps] * 2
    assert max(staleness) >= 5
    assert loss_of(schedule.after) < 0.3 * before


def test_staleness_is_told_of_every_gradient_and_a_log_of_the_run_tells_it_again(tmp_path: Path) -> None:
    plan = Plan("asynchronous", num_workers=3, steps=15)
    schedule = Schedule(plan, 2, straggler=1)
    schedule.servers.follow(0, DiskLog(tmp_path))
    told = schedule.run()
    histogram = schedule.servers.machines[0].lead.progress.staleness
    assert told == schedule.others_between  # counted beside the servers
    assert {value: told.count(value) for value in set(told)} == dict(histogram)
    assert max(told) >= 3
    again = plan.machine(0)
    restore(tmp_path, again)
    assert dict(again.lead.progress.staleness) == dict(histogram)
    assert torch.equal(again.shard.values, schedule.after)


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}])
def test_a_centralised_parameter_server_is_allreduce_bit_for_bit(optimizer: dict[str, Any], tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"optimizer": {**optimizer, "lr": 0.05}, "steps": 7}
    found = central_run.train_central(few_digits, central_run.central_settings(2, **chosen), tmp_path)
    reduced = train_laid_out(few_digits, layout_settings({"data": 2}, **chosen))
    assert same_bits(found.weights, reduced.weights)
    assert found.losses == reduced.losses
    plan = Plan("synchronous", num_workers=2, optimizer=optimizer)
    values, _, workers = train_central(plan)
    assert sum(worker.client.bytes_sent for worker in workers) == 2 * plan.steps * values.nbytes


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_a_sharded_parameter_server_is_one_server_and_each_shard_gets_its_part_of_the_bytes(shards: int) -> None:
    one = train_central(Plan("synchronous", num_workers=2))[0]
    plan = Plan("synchronous", num_workers=2, shards=shards)
    servers = Servers(plan)
    channels = [servers.channels(number) for number in range(2)]
    run_all([Worker(plan, number, channels[number]).run for number in range(2)])
    assert torch.equal(servers.values(), one)
    sent = [sum(own[shard].bytes_sent for own in channels) for shard in range(shards)]
    sizes = [stop - start for start, stop in Partition.of(make_model(), shards).bounds]
    assert sent == [2 * plan.steps * 8 * size for size in sizes]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT
    servers.close()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_global_checkpoint_of_all_shards_is_of_one_step_also_under_load(seed: int | None) -> None:
    """Check it with all workers at once, and with one moving at a time: another still has a share when one is due."""
    coordinator = {"checkpoint_every_steps": 4}
    plan = Plan("asynchronous", num_workers=3, shards=4, steps=16, coordinator=coordinator, optimizer=SGD, lr=0.125)
    schedule = Schedule(plan, seed or 0, straggler=0)
    before = schedule.after
    for worker in schedule.workers:  # each share moves every element by its part of the batch

        def compute(order: Compute, worker: Worker = worker) -> tuple[float, dict[str, Any]]:
            worker.flat.gradient.fill_(order.num_samples / order.batch_samples)
            return 0.0, {}

        worker.compute = compute  # type: ignore[method-assign]
    if seed is None:
        run_all([worker.run for worker in schedule.workers])
        schedule.servers.close()
    else:
        schedule.run()
    saves = [torch.cat([shard["values"] for shard in save]) for worker in schedule.workers for save in worker.saves]
    assert len(saves) == 4
    moved = sorted(float((before - save).mean()) / 0.125 for save in saves)
    assert moved == pytest.approx([4, 8, 12, 16], abs=1e-12)
    for save in saves:
        assert float((before - save).std()) <= 1e-12


def test_replication_has_endpoints_of_its_own_and_adds_nothing_to_a_worker_s() -> None:
    """Compare no copy, one, and a flood: twelve copies, each sent the whole state and every entry."""
    traffic, replicated = [], []
    for num_backups in (0, 1, 12):
        plan = Plan("asynchronous", steps=6)
        servers, ends = Servers(plan), []
        for _ in range(num_backups):
            near, far = thread_pair("primary", "backup")
            backup = Backup(plan.machine(0))
            spawn(lambda backup=backup, far=far: backup.follow(far))
            servers.follow(0, Replicator(near))
            ends.append(near)
        channel, contents = servers.channel(0, 0), list[bytes]()
        receive = channel.irecv

        def irecv(receive: Any = receive, contents: list[bytes] = contents, **expected: Any) -> Any:
            handle = receive(**expected)
            handle.future.add_done_callback(lambda answer: contents.append(answer.result().content))
            return handle

        channel.irecv = irecv  # type: ignore[method-assign]
        Worker(plan, 0, [channel]).run()
        messages = channel.messages_sent, channel.messages_received
        traffic.append((messages, channel.bytes_sent, channel.bytes_received, contents))
        replicated.append(sum(end.bytes_sent for end in ends))
        servers.close()
    assert replicated[0] == 0
    assert replicated[2] == 12 * replicated[1] > 10 * traffic[0][1]
    assert traffic[0] == traffic[1] == traffic[2]

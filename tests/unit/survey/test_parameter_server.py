"""The survey's parameter servers, by its own checks: workers and servers as threads, one worker moving at a time where
the order matters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.channel import thread_pair
from orchestray.platform.collective import Collective
from orchestray.trainers.central.orders import Compute
from orchestray.trainers.central.partition import ALIGNMENT, FlatModel, Partition
from orchestray.trainers.central.persistence import DiskLog, restore
from orchestray.trainers.central.replication import Backup, Replicator
from orchestray.trainers.optimizers import make_optimizer
from support.central import (
    JOIN_S,
    Plan,
    Schedule,
    Servers,
    Worker,
    make_data,
    make_model,
    run_all,
    share_loss,
    spawn,
    train_central,
)
from support.threads import run_replicas

torch.set_num_threads(1)

SGD = {"type": "sgd"}


def loss_of(values: Tensor) -> float:
    """Over all samples."""
    model = make_model()
    FlatModel(model).values.copy_(values)
    inputs, targets = make_data()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(inputs), targets))


@pytest.mark.parametrize("seed", range(5))
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
    histogram = schedule.servers.machines[0].lead.accounts.staleness
    assert {value: told.count(value) for value in set(told)} == dict(histogram)
    assert max(told) >= 3
    again = plan.machine(0)
    restore(tmp_path, again)
    assert dict(again.lead.accounts.staleness) == dict(histogram)
    assert torch.equal(again.shard.values, schedule.after)


@pytest.mark.parametrize("seed", range(3))
def test_distributed_hogwild_applies_the_sum_of_what_was_sent_in_whatever_order(seed: int) -> None:
    plan = Plan("asynchronous", num_workers=4, shards=3, steps=25, optimizer=SGD, lr=0.03125)
    schedule = Schedule(plan, seed, straggler=3)
    before = schedule.servers.values()
    schedule.run()
    sent = torch.stack(schedule.sent).sum(0)
    assert float((before - schedule.after - 0.03125 * sent).abs().max()) <= 1e-12
    assert loss_of(schedule.after) < 0.5 * loss_of(before)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bound", [1, 2, 5])
def test_stale_synchronous_parallel_never_exceeds_its_bound(bound: int, seed: int) -> None:
    plan = Plan("stale", staleness=bound, num_workers=3, steps=20)
    staleness = Schedule(plan, seed, straggler=2).run()
    assert max(staleness) == bound


def test_stale_synchronous_parallel_without_staleness_is_synchronous_bit_for_bit() -> None:
    found = [train_central(Plan(kind, num_workers=3, shards=2))[0] for kind in ("stale", "synchronous")]
    assert torch.equal(found[0], found[1])


def allreduced(plan: Plan) -> Tensor:
    """Two replicas that sum the gradients of their shares."""

    def replica(collective: Collective) -> Tensor:
        model = make_model()
        flat, optimizer = FlatModel(model), make_optimizer(**plan.optimizer)
        named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        optimizer.init(named)
        settings = plan.settings
        for step in range(1, plan.steps + 1):
            flat.begin()
            epoch, index = divmod(step - 1, settings.steps_per_epoch)
            share, pieces = settings.shares(step, 2)[collective.rank]
            samples = settings.batch_samples(step)
            share_loss(model, Compute(0, step, epoch, index, share, 2, pieces, samples, 0, 1, 0))
            gradient = flat.gradient
            collective.all_reduce(gradient)
            parts = gradient.split_with_sizes([parameter.numel() for _, parameter in named])
            gradients = [part.view_as(parameter) for part, (_, parameter) in zip(parts, named, strict=True)]
            optimizer.step([parameter for _, parameter in named], gradients, plan.lr)
        return flat.values

    first, second = run_replicas(2, replica)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}])
def test_a_centralised_parameter_server_is_allreduce_bit_for_bit(optimizer: dict[str, Any]) -> None:
    plan = Plan("synchronous", num_workers=2, optimizer=optimizer)
    values, _, workers = train_central(plan)
    assert torch.equal(values, allreduced(plan))
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


def test_workers_come_and_go_from_two_to_four_to_one_and_every_sample_is_used_once() -> None:
    plan = Plan("asynchronous", num_workers=2, shards=2, steps=12)
    servers = Servers(plan)
    workers = [Worker(plan, number, servers.channels(number)) for number in range(4)]

    def at(step: int) -> Any:
        return lambda order: isinstance(order, Compute) and order.step >= step

    held = run_all([lambda worker=worker: worker.run(at(4)) for worker in workers[:2]])
    servers.servers[0].resize(4)
    late = [lambda worker=worker: worker.run(at(8)) for worker in workers[2:]]
    early = [
        lambda worker=worker, order=order: worker.go_on(order, at(8))
        for worker, order in zip(workers[:2], held, strict=True)
    ]
    held = run_all([*early, *late])
    for worker in workers[1:]:
        worker.client.close()  # each with an order
    servers.servers[0].resize(1)
    workers[0].go_on(held[0])
    pieces = sorted((order.epoch, *piece) for worker in workers for order in worker.applied for piece in order.pieces)
    used = [(epoch, position) for epoch, start, stop in pieces for position in range(start, stop)]
    assert used == [(epoch, position) for epoch in range(3) for position in range(40)]
    assert {order.num_shares for worker in workers for order in worker.applied} == {1, 2, 4}
    servers.close()


def test_backup_workers_repeat_the_slowest_share_and_the_first_answer_counts_once() -> None:
    plan = Plan("synchronous", num_workers=3, shards=2, ledger={"num_shares": 2, "backup_workers": 1}, steps=3)
    servers = Servers(plan)
    slow, quick, backup = (Worker(plan, number, servers.channels(number)) for number in range(3))
    slow_order = slow.run(until=lambda order: True)
    quick.do(quick.run(until=lambda order: True))
    copy = backup.run(until=lambda order: True)
    assert isinstance(copy, Compute)
    assert copy.copy
    assert copy.order_id == slow_order.order_id  # type: ignore[union-attr]
    backup.do(copy)
    slow.do(slow_order)
    assert [worker.results[-1].counts for worker in (slow, quick, backup)] == [False, True, True]
    assert {"event": "dropped", "order_id": copy.order_id, "workers": [0]} in servers.events
    run_all([lambda worker=worker: worker.go_on(worker.client.next()) for worker in (slow, quick, backup)])
    without = train_central(Plan("synchronous", num_workers=2, steps=3))[0]
    assert torch.equal(servers.values(), without)
    servers.close()


def test_the_global_checkpoint_of_all_shards_is_of_one_step_also_under_load() -> None:
    ledger = {"checkpoint_every_steps": 4}
    plan = Plan("asynchronous", num_workers=3, shards=4, steps=16, ledger=ledger, optimizer=SGD, lr=0.125)
    servers = Servers(plan)
    before = servers.values()
    workers = [Worker(plan, number, servers.channels(number)) for number in range(3)]
    for worker in workers:  # each share moves every element by its part of the batch

        def compute(order: Compute, worker: Worker = worker) -> tuple[float, dict[str, Any]]:
            worker.flat.gradient.fill_(order.num_samples / order.batch_samples)
            return 0.0, {}

        worker.compute = compute  # type: ignore[method-assign]
    run_all([worker.run for worker in workers])
    saves = [torch.cat([shard["values"] for shard in save]) for worker in workers for save in worker.saves]
    assert len(saves) == 4
    moved = sorted(float((before - save).mean()) / 0.125 for save in saves)
    assert moved == pytest.approx([4, 8, 12, 16], abs=1e-12)
    for save in saves:
        assert float((before - save).std()) <= 1e-12
    servers.close()


def test_a_replicated_shard_has_at_its_backup_all_that_was_acknowledged_bit_for_bit() -> None:
    plan = Plan("asynchronous", num_workers=3, shards=2, optimizer={"type": "adam"}, steps=10)
    servers = Servers(plan)
    backups = [Backup(plan.machine(shard)) for shard in range(2)]
    pairs = [thread_pair("primary", "backup") for _ in backups]
    threads = [spawn(lambda b=b, far=far: b.follow(far)) for b, (_, far) in zip(backups, pairs, strict=True)]
    for shard, (near, _) in enumerate(pairs):
        servers.follow(shard, Replicator(near))
    run_all([Worker(plan, number, servers.channels(number)).run for number in range(3)])
    values = servers.values()
    servers.close()
    for thread in threads:
        thread.join(JOIN_S)
    assert torch.equal(torch.cat([backup.promote().shard.values for backup in backups]), values)


def test_the_persistence_manager_brings_every_server_back_as_of_its_last_acknowledged_version(tmp_path: Path) -> None:
    plan = Plan("asynchronous", num_workers=2, shards=3, optimizer={"type": "adam"}, steps=8)
    servers = Servers(plan)
    for shard in range(3):
        servers.follow(shard, DiskLog(tmp_path / str(shard), log_bytes=2000))
    workers = [Worker(plan, number, servers.channels(number)) for number in range(2)]
    run_all([lambda w=w: w.run(lambda order: isinstance(order, Compute) and order.step >= 6) for w in workers])
    values, versions = servers.values(), [server.version for server in servers.servers]
    again = [plan.machine(shard) for shard in range(3)]
    for shard, machine in enumerate(again):
        restore(tmp_path / str(shard), machine)
    assert [machine.shard.version for machine in again] == versions
    assert torch.equal(torch.cat([machine.shard.values for machine in again]), values)
    assert json.dumps(again[0].lead.to_json()) == json.dumps(servers.machines[0].lead.to_json())
    servers.close()


def test_replication_has_endpoints_of_its_own_and_adds_nothing_to_a_worker_s() -> None:
    traffic = []
    for replicated in (False, True):
        plan = Plan("asynchronous", steps=6)
        servers = Servers(plan)
        near, far = thread_pair("primary", "backup")
        if replicated:
            backup = Backup(plan.machine(0))
            spawn(lambda backup=backup, far=far: backup.follow(far))
            servers.follow(0, Replicator(near))
        channel = servers.channel(0, 0)
        Worker(plan, 0, [channel]).run()
        traffic.append((channel.messages_sent, channel.bytes_sent, channel.messages_received, channel.bytes_received))
        assert (near.bytes_sent > 0) == replicated
        servers.close()
    assert traffic[0] == traffic[1]

"""Residuals of compressors: in checkpoints, over the loss of a process, and when a worker leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.channel import Channel, FaultScript
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import LEFT, Compute, Deposit, Finish, Save, Validate, Wait
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.protocol.residuals import Residuals, deposit, hand_over, kept_by, take_up
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.worker.client import ShardClient
from support.central import Plan, Servers, make_model
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.ledgers import compute, coordinator, done
from support.staged_run import staged_settings, train_staged
from support.training import few_digits, same_bits

TOPK = {"type": "topk", "ratio": 0.05, "error_feedback": True}
DGC = {"type": "dgc", "ratio": 0.05, "momentum": 0.9, "clip": None, "warmup_steps": 0, "error_feedback": True}


def task() -> Any:
    return few_digits()


@pytest.mark.parametrize(("compression", "shards"), [(TOPK, 1), (TOPK, 2), (DGC, 2)], ids=["topk", "shards", "dgc"])
def test_a_resumed_run_goes_on_with_what_its_workers_had_yet_to_send(
    compression: dict[str, Any], shards: int, tmp_path: Path
) -> None:
    plain = {"type": "sgd", "lr": 0.1}
    settings = replace(central_settings(1, {"shards": shards}, steps=9, optimizer=plain), compression=compression)
    whole = train_central(task, settings, tmp_path / "whole")
    storage = str(tmp_path / "checkpoints")
    saved = replace(settings, steps=5, checkpoint_storage=storage, checkpoint_every_steps=5)
    train_central(task, saved, tmp_path / "first")
    again = train_central(task, settings, tmp_path / "second", checkpoint=latest_good(storage)[0])
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[5:]


def test_a_resumed_run_of_replicas_in_stages_goes_on_with_what_all_stages_had_yet_to_send(tmp_path: Path) -> None:
    network: dict[str, Any] = {"data": 1, "pipeline": 2, "split": ["2"]}
    chosen: dict[str, Any] = {"steps": 7, "optimizer": {"type": "sgd", "lr": 0.1}}
    settings = replace(staged_settings(network, {"consistency": "asynchronous"}, **chosen), compression=TOPK)
    whole = train_staged(task, settings, tmp_path / "whole")
    saves = replace(settings, checkpoint_storage=str(tmp_path / "checkpoints"), checkpoint_every_steps=4)
    train_staged(task, replace(saves, steps=4), tmp_path / "first")
    again = train_staged(task, saves, tmp_path / "second")  # from what the storage holds
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[4:]


class Trained:
    """A worker of servers that take each push at once, by plain SGD with a learning rate of 1."""

    def __init__(
        self,
        servers: Servers,
        worker: int,
        channels: Sequence[Channel] = (),
        replace: Callable[[int, Exception], Channel] | None = None,
    ) -> None:
        plan = servers.plan
        model = make_model()
        flat = FlatModel(model)
        self.client = ShardClient(
            channels or servers.channels(worker),
            Partition.of(model, plan.shards),
            worker,
            flat.values,
            compressors=[plan.compressor(worker) for _ in range(plan.shards)],
            replace=replace,
        )
        self.client.hello()
        self.orders: list[Compute] = []
        """The order of its last push."""
        self.gradients: dict[int, Tensor] = {}
        """Its gradients by order; that of a share is the same for every worker."""
        self.total = torch.zeros_like(flat.values)
        """Sum of its gradients."""

    def push(self) -> None:
        order = self.client.next()
        assert isinstance(order, Compute)
        generator = torch.Generator().manual_seed(order.order_id)
        self.gradients[order.order_id] = gradient = torch.randn(
            self.total.shape, generator=generator, dtype=torch.float64
        )
        self.total += gradient
        self.orders = [order]
        self.client.push([order], gradient, loss_sums=[0.0])

    def state(self) -> dict[str, Tensor]:
        """Return the state of the compressor of the only shard."""
        assert self.client.encoder.compressors is not None
        (compressor,) = self.client.encoder.compressors
        return compressor.state()

    def kept(self) -> Tensor:
        """Return what its compressors keep, in the order of the parameters."""
        compressors = self.client.encoder.compressors
        assert compressors is not None
        views = [view for one in compressors for view in one.views(one.state()["residual"])]
        return torch.cat([view.reshape(-1) for view in views])


def values_of(servers: Servers) -> Tensor:
    return torch.cat([machine.shard.values for machine in servers.machines]).clone()


def plan_of(shards: int, num_workers: int = 2) -> Plan:
    return Plan(num_workers=num_workers, shards=shards, steps=50, optimizer={"type": "sgd"}, lr=1.0, compression=TOPK)


@pytest.mark.parametrize("shards", [1, 3])
def test_with_what_a_leaving_worker_hands_over_the_sum_of_all_gradients_is_whole(shards: int) -> None:
    servers = Servers(plan_of(shards))
    before = values_of(servers)
    staying, leaving = (Trained(servers, worker) for worker in range(2))
    for _ in range(3):
        staying.push()
        leaving.push()
    hand_over(leaving.client)
    hand_over(leaving.client)  # as when its answer was lost with a server
    staying.push()
    moved = before - values_of(servers)
    assert torch.allclose(moved, staying.total + leaving.total - staying.kept(), rtol=0, atol=1e-12)
    servers.close()


@pytest.mark.parametrize("message", range(1, 7))
@pytest.mark.parametrize("fails", ["left_faults", "right_faults"], ids=["request", "answer"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_that_is_given_up_while_its_lead_is_replaced_keeps_nothing_of_a_push_that_is_dropped(
    shards: int, fails: str, message: int
) -> None:
    servers = Servers(plan_of(shards))
    before = values_of(servers)
    others: list[Trained] = []

    def give_up(shard: int, _: Exception) -> Channel:
        servers.servers[0].close()
        servers.servers[0] = ShardServer(servers.machines[0])  # a backup has the same state
        servers.servers[0].forget(0)
        others.append(Trained(servers, 1, replace=give_up))
        others[0].push()
        return servers.channel(shard, 0)

    channels = servers.channels(0)
    channels[0] = servers.channel(0, 0, **{fails: FaultScript().fail_at(message)})
    given_up = Trained(servers, 0, channels, give_up)
    for _ in range(3):
        given_up.push()
    (other,) = others
    pushed = torch.stack([*(given_up.gradients | other.gradients).values()]).sum(0)
    arrived = before - values_of(servers)
    assert torch.allclose(arrived + given_up.kept() + other.kept(), pushed, rtol=0, atol=1e-12)
    servers.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_deposit_is_a_successors_until_the_next_push_and_then_nobodys(shards: int) -> None:
    servers = Servers(plan_of(shards))
    first = Trained(servers, 0)
    first.push()
    deposit(first.client)
    second = Trained(servers, 0)
    assert not take_up(second.client, None)
    assert torch.equal(second.kept(), first.kept())
    assert second.kept().any()
    second.push()
    third = Trained(servers, 0)
    assert take_up(third.client, None)  # in a new process nobody knows
    assert not third.kept().any()
    fourth = Trained(servers, 0)
    assert not take_up(fourth.client, kept_by(second.client))  # in the old one it is still there
    assert torch.equal(fourth.kept(), second.kept())
    servers.close()


def test_a_copy_of_a_server_knows_what_was_deposited_heard_pushed_and_owed() -> None:
    plan = plan_of(1, num_workers=3)
    servers = Servers(plan)
    workers = [Trained(servers, worker) for worker in range(3)]
    for one in workers:
        one.push()
    deposit(workers[0].client)
    hand_over(workers[2].client)
    state, tensors = servers.machines[0].state()
    copy = plan.machine(0)
    copy.load_state(json.loads(json.dumps(state)), tensors)
    pushed = [Part(one.step, one.share, one.num_samples, one.batch_samples) for one in workers[1].orders]
    assert [residuals_of(copy).has(worker, pushed) for worker in range(3)] == [False, True, False]
    named, expected = residuals_of(copy).tensors(), residuals_of(servers.machines[0]).tensors()
    assert named.keys() == expected.keys() == {"residuals/0/residual", "residuals/owed"}
    assert all(torch.equal(named[name], expected[name]) for name in named)
    assert [residuals_of(copy).of(worker)[1] for worker in range(3)] == [True, True, False]
    servers.close()


def residuals_of(machine: Machine) -> Residuals:
    assert machine.residuals is not None
    return machine.residuals


def test_a_run_that_is_resumed_with_fewer_workers_owes_what_the_others_kept() -> None:
    plan = plan_of(1)
    servers = Servers(plan)
    workers = [Trained(servers, worker) for worker in range(2)]
    for one in workers:
        one.push()
        deposit(one.client)
    saved = residuals_of(servers.machines[0]).tensors()
    resumed = residuals_of(plan.machine(0))
    assert resumed.begin(saved, num_workers=1)
    gradient = torch.zeros_like(workers[1].total)
    resumed.add_owed(gradient)
    assert torch.equal(gradient, workers[1].kept())
    assert resumed.of(1) == ({}, False)
    resumed.hand_over(0, *zip(*workers[0].state().items(), strict=True))  # it leaves before its first push
    resumed.add_owed(gradient.zero_())
    assert torch.equal(gradient, workers[0].kept() + workers[1].kept())
    servers.close()


def test_what_another_cut_kept_is_not_taken() -> None:
    servers = Servers(plan_of(2))
    worker = Trained(servers, 0)
    worker.push()
    deposit(worker.client)
    saved = residuals_of(servers.machines[0]).tensors()
    assert not residuals_of(plan_of(1).machine(0)).begin(saved, None)
    hand_over(worker.client)
    saved = residuals_of(servers.machines[0]).tensors()
    assert saved.keys() == {"residuals/owed"}
    assert not residuals_of(plan_of(1).machine(0)).begin(saved, None)
    servers.close()


# -- the coordinator ---------------------------------------------------------------------------------------------------


SAVES_EACH: dict[str, Any] = {"checkpoint_every_steps": 1, "validate_every_steps": 1000}


def at_save(num_workers: int, *, deposits: bool = True) -> Coordinator:
    """Return a run after the first batch, after which a checkpoint is due."""
    run = coordinator(num_workers, num_shares=num_workers, deposits=deposits, **SAVES_EACH)
    orders = [compute(run, worker) for worker in range(num_workers)]
    for worker, order in enumerate(orders):
        done(run, worker, order)
    return run


def deposit_order(run: Coordinator, worker: int) -> Deposit:
    order = run.next(worker)
    assert isinstance(order, Deposit)
    return order


def test_a_checkpoint_is_saved_once_all_workers_have_deposited() -> None:
    run = at_save(2)
    first = deposit_order(run, 0)
    assert run.next(0) == Wait(drain=True)
    assert run.next(0, holding=[]) == first  # it was lost on the way
    assert run.deposited(0, first.order_id)
    assert run.next(0) == Wait()
    assert run.deposited(1, deposit_order(run, 1).order_id)
    again = Coordinator.from_json(run.to_json())
    for one in (run, again):
        save = one.next(0)
        assert isinstance(save, Save)
        assert one.next(1) == Wait()
        assert one.saved(0, save.order_id)
        assert isinstance(one.next(1), Compute)


def test_a_worker_that_is_lost_is_not_waited_for_and_who_comes_deposits_too() -> None:
    run = at_save(3)
    for worker in (0, 1):
        run.deposited(worker, deposit_order(run, worker).order_id)
    assert run.next(0) == Wait()
    run.leave(2)
    run.join(3)
    assert run.next(0) == Wait()
    run.deposited(3, deposit_order(run, 3).order_id)
    assert isinstance(run.next(0), Save)


def test_where_nothing_is_kept_nobody_deposits() -> None:
    assert isinstance(at_save(2, deposits=False).next(0), Save)


def test_a_dismissed_worker_does_what_it_holds_and_then_leaves_before_a_checkpoint_is_saved() -> None:
    run = coordinator(2, num_shares=2, deposits=True, lookahead=2, **SAVES_EACH)
    orders = [compute(run, worker) for worker in range(2)]
    run.dismiss(1)
    assert run.next(1) == Wait(drain=True)
    for worker, order in enumerate(orders):
        done(run, worker, order)
    run = Coordinator.from_json(run.to_json())
    assert run.next(1) == Finish(LEFT)
    run.deposited(0, deposit_order(run, 0).order_id)
    assert run.next(0) == Wait()  # what it hands over is not everywhere yet
    run.leave(1)
    assert isinstance(run.next(0), Save)


def test_a_worker_that_is_not_there_cannot_be_dismissed_and_one_that_comes_again_stays() -> None:
    run = coordinator(2, deposits=True)
    run.dismiss(7)
    run.join(7)
    run.dismiss(1)
    run.join(1)
    assert not isinstance(run.next(7), Finish | Validate)
    assert not isinstance(run.next(1), Finish)


# -- lock-step replicas ------------------------------------------------------------------------------------------------


def test_another_number_of_replicas_is_told_that_what_was_kept_is_left_out(tmp_path: Path) -> None:
    plain = {"type": "sgd", "lr": 0.1}
    settings = replace(layout_settings({"data": 2}, steps=2, optimizer=plain), compression=TOPK)
    train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found = latest_good(str(tmp_path))[0]
    assert found is not None
    for data, is_told in ((2, False), (3, True), (1, True)):
        compression = TOPK if data > 1 else {"type": "none"}
        other = replace(layout_settings({"data": data}, steps=3, optimizer=plain), compression=compression)
        told = train_laid_out(task, other, load=lambda: Loaded(found)).events
        assert any("still to be sent" in str(event.get("text")) for event in told) is is_told

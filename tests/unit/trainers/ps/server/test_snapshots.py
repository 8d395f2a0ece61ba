"""Workers that read parameters where the server has them: the same training as with copies, and versions that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.assignments import Compute
from support.central import Plan, Servers, Worker, train_central
from support.patience import PATIENCE_S

torch.set_num_threads(1)

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd"},
    {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"type": "sgd", "weight_decay": 0.01},
    {"type": "adam", "weight_decay": 0.01},
    {"type": "adagrad"},
    {"type": "rmsprop", "momentum": 0.5},
    {"type": "lars", "weight_decay": 0.01},
]


class Looking(Worker):
    """A worker that computes on the server's memory."""

    def __init__(self, plan: Plan, number: int, servers: Servers) -> None:
        self.channels = servers.channels(number)
        super().__init__(plan, number, self.channels, stays_there=True)
        self.client.hello()

    def compute(self, order: Compute) -> tuple[float, dict[str, Any]]:
        self.flat.look_at(self.client.values)
        return super().compute(order)

    def step(self) -> None:
        """Do one share."""
        order = self.client.next()
        assert isinstance(order, Compute)
        self.do(order)


def _trained(plan: Plan) -> tuple[Tensor, list[float], Looking]:
    servers = Servers(plan)
    worker = Looking(plan, 0, servers)
    worker.go_on(worker.client.next())
    worker.client.close()
    values, losses = servers.values(), servers.losses()
    servers.close()
    return values, losses, worker


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_a_worker_that_reads_what_the_server_has_trains_as_one_that_has_a_copy(
    optimizer: dict[str, Any], batch_norm: bool
) -> None:
    plan = Plan(optimizer=optimizer, batch_norm=batch_norm, lends=True)
    copied, copied_losses, [copier] = train_central(plan)
    shown, shown_losses, reader = _trained(plan)
    assert torch.equal(shown, copied)
    assert shown_losses == copied_losses
    assert reader.client.values.data_ptr() != reader.client.home.data_ptr()
    assert reader.client.bytes_sent == copier.client.bytes_sent
    assert reader.channels[0].bytes_received == copier.client._links[0]._channel.bytes_received


def test_where_nothing_can_be_lent_the_parameters_come_home() -> None:
    plan = Plan()
    copied, copied_losses, _ = train_central(plan)
    sent, sent_losses, worker = _trained(plan)
    assert torch.equal(sent, copied)
    assert sent_losses == copied_losses
    assert worker.client.values is worker.client.home


def test_what_a_worker_reads_stays_as_it_is_whatever_the_others_push() -> None:
    plan = Plan(num_workers=2, lends=True, steps=20)
    servers = Servers(plan)
    slow, fast = (Looking(plan, number, servers) for number in range(2))
    slow.client.pull()
    read, before = slow.client.values, slow.client.values.clone()
    for _ in range(8):
        fast.step()
        assert torch.equal(read, before)
    slow.client.pull()
    assert torch.equal(read, before)  # until the worker has said that it reads a newer one
    assert torch.equal(slow.client.values, servers.values())
    assert not torch.equal(slow.client.values, before)
    for worker in (slow, fast):
        worker.client.close()
    servers.close()


def test_there_are_no_more_versions_than_two_a_worker_and_one() -> None:
    plan = Plan(num_workers=2, lends=True, steps=30)
    servers = Servers(plan)
    workers = [Looking(plan, number, servers) for number in range(2)]
    for _ in range(10):
        for worker in workers:
            worker.step()
    assert 1 < len(servers.servers[0]._versions._blocks) <= 2 * len(workers) + 1
    for worker in workers:
        worker.client.close()
    servers.close()


def test_what_other_machines_are_still_being_sent_takes_no_memory_from_the_versions() -> None:
    # Memory from before the first loan came back from such a send, was written to, and moved out of again: for ever.
    plan = Plan(num_workers=1, lends=True, steps=30)
    servers = Servers(plan)
    shard, versions = servers.servers[0]._machine.shard, servers.servers[0]._versions
    remote = shard.lend()
    worker = Looking(plan, 0, servers)
    for _ in range(12):
        worker.step()
        worker.client.pull()
        shard.give_back(remote)
        shard.move(torch.zeros_like(shard.values))  # by a worker of another machine, which is sent what comes of it
        remote = shard.lend()
        worker.client.pull()
    assert 1 < len(versions._blocks) <= 4
    worker.client.close()
    servers.close()


def test_memory_of_a_worker_that_left_is_used_again_and_that_of_one_that_came_back_is_not() -> None:
    plan = Plan(num_workers=3, lends=True, steps=60)
    servers = Servers(plan)
    stayer, leaver, changer = (Looking(plan, number, servers) for number in range(3))
    for worker in (leaver, changer):
        worker.client.pull()
    kept, before = changer.client.values, changer.client.values.clone()
    changer.client.reconnect(0, servers.channel(0, 2))
    leaver.client.close()
    changer.client.pull()  # after this the server has heard of it over the new channel
    for thread in servers.threads[1:3]:
        thread.join(PATIENCE_S)
    assert len(servers.servers[0]._versions._read) <= 2
    num_blocks = []
    for _ in range(12):
        stayer.step()
        assert torch.equal(kept, before)
        num_blocks.append(len(servers.servers[0]._versions._blocks))
    assert num_blocks[-1] == num_blocks[5]
    for worker in (stayer, changer):
        worker.client.close()
    servers.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_a_step_into_other_memory_has_the_bits_of_a_step_in_place(
    optimizer: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (7,), (63,), (64,), (65, 3), (1000,), (128, 128), (5, 401)]

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    in_place, elsewhere = draw(), [torch.empty(shape, dtype=dtype) for shape in shapes]
    source = [tensor.clone() for tensor in in_place]
    one, other = make_optimizer(**optimizer), make_optimizer(**optimizer)
    for made in (one, other):
        made.init((str(index), tensor) for index, tensor in enumerate(source))
    for number in range(3):
        grads: list[Tensor | None] = list(draw())
        grads[number] = None
        before = [tensor.clone() for tensor in source]
        one.step(in_place, [None if grad is None else grad.clone() for grad in grads], 0.1)
        other.step_into(elsewhere, source, grads, 0.1)
        assert all(torch.equal(a, b) for a, b in zip(source, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(in_place, elsewhere, strict=True))
        source, elsewhere = elsewhere, source
    states = one.state_tensors(), other.state_tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())

"""Workers whose memory the servers see: the same training as where everything is sent, and the same bytes counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchestray.trainers.ps.protocol.assignments import Compute
from support.central import Plan, Servers, Worker, train_central

torch.set_num_threads(1)

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd"},
    {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"type": "adam", "weight_decay": 0.01},
    {"type": "adagrad", "weight_decay": 0.01},
    {"type": "rmsprop", "momentum": 0.5, "weight_decay": 0.01},
    {"type": "lars", "weight_decay": 0.01},
]


@pytest.mark.parametrize(
    "plan",
    [
        Plan("asynchronous"),
        Plan("asynchronous", batch_norm=True),
        Plan("asynchronous", shards=3, batch_norm=True),
        Plan("asynchronous", shard={"grad_clip": 0.01}),
        Plan("synchronous", num_workers=2),
        Plan("stale", num_workers=2, shards=2, shard={"scale_by_staleness": True}, batch_norm=True),
        Plan("asynchronous", compression={"type": "onebit"}, batch_norm=True),
    ],
    ids=lambda plan: f"{plan.consistency}-{plan.shards}-{plan.batch_norm}-{plan.shard or plan.compression}",
)
def test_lent_gradients_train_as_sent_ones_do(plan: Plan) -> None:
    if plan.consistency == "stale":  # what a worker reads is a matter of chance but for a bound of zero
        plan = replace(plan, staleness=0)
    sent, sent_losses, senders = train_central(plan)
    lent, lent_losses, lenders = train_central(replace(plan, lends=True))
    assert torch.equal(lent, sent)
    assert lent_losses == sent_losses
    assert sum(w.client.bytes_sent for w in lenders) == sum(w.client.bytes_sent for w in senders)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("grad_clip", [None, 0.001])
@pytest.mark.parametrize("consistency", ["asynchronous", "synchronous"])
def test_a_server_leaves_a_lent_gradient_as_it_is_for_it_may_be_sent_again(
    optimizer: dict[str, Any], grad_clip: float | None, consistency: str
) -> None:
    plan = Plan(consistency, optimizer=optimizer, shard={"grad_clip": grad_clip}, lends=True)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    worker.client.hello()
    for _ in range(3):
        order = worker.client.next()
        assert isinstance(order, Compute)
        worker.client.pull(order.min_version)
        loss_sum, push = worker.compute(order)
        before = worker.flat.gradient.clone()
        assert worker.client.push([order], worker.flat.gradient, loss_sums=[loss_sum], **push).counts
        assert torch.equal(worker.flat.gradient, before)
    worker.client.close()
    servers.close()


def test_no_gradient_or_parameter_of_a_lending_worker_goes_through_the_channel() -> None:
    plan = Plan(lends=True, batch_norm=True)
    servers = Servers(plan)
    channels = servers.channels(0)
    worker = Worker(plan, 0, channels)
    num_messages: list[int] = []
    worker.client.hello()
    while isinstance(order := worker.client.next(), Compute):
        before = channels[0].messages_sent + channels[0].messages_received
        worker.client.pull(order.min_version)
        num_messages.append(channels[0].messages_sent + channels[0].messages_received - before)
    worker.client.close()
    servers.close()
    assert set(num_messages) == {2}  # a request and an answer, with no tensors behind


def test_what_the_server_does_after_a_push_does_not_reach_into_a_worker_that_did_not_ask() -> None:
    plan = Plan(num_workers=2, lends=True)
    servers = Servers(plan)
    first, second = (Worker(plan, number, servers.channels(number)) for number in range(2))
    for worker in (first, second):
        worker.client.hello()
        worker.client.pull()
    held = first.flat.values.clone()
    for _ in range(2):
        order = second.client.next()
        assert isinstance(order, Compute)
        second.do(order)
    second.client.pull()
    assert torch.equal(first.flat.values, held)
    assert not torch.equal(second.flat.values, held)
    for worker in (first, second):
        worker.client.close()
    servers.close()

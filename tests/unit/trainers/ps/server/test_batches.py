"""Gradients that wait for the rest of their batch, and their memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from orchestray.trainers.ps.protocol.requests import Origin
from orchestray.trainers.ps.server.shard import Applied
from support.central import Plan, Servers, Worker, run_all


def test_a_server_needs_no_more_memory_for_gradients_than_it_has_workers() -> None:
    plan = Plan("synchronous", num_workers=2, steps=20)
    servers, taken = Servers(plan), list[Tensor]()
    shard = servers.machines[0].shard
    push = shard.push

    def noted(origin: Origin, gradient: Tensor, *rest: Any) -> Applied:
        taken.append(gradient)  # referenced, so that no other gradient gets its memory by chance
        return push(origin, gradient, *rest)

    shard.push = noted  # type: ignore[method-assign]
    run_all([Worker(plan, number, servers.channels(number)).run for number in range(2)])
    servers.close()
    assert len(taken) == 40
    assert len({gradient.data_ptr() for gradient in taken}) <= 2

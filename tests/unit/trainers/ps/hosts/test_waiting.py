"""Seconds that a worker reports as waited, by a clock that goes on only when a test advances it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.comm.channel import Channel, FaultScript
from orchestray.trainers.loop import task_host
from orchestray.trainers.ps.hosts import worker_host
from orchestray.trainers.ps.protocol.assignments import Compute
from support.central import JOIN_S, Plan, Servers, Worker
from support.central_run import central_settings, train_through_a_loss_of_all_servers
from support.training import digits, few_digits


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def slow(servers: Servers, clock: Clock, seconds: float) -> None:
    """Have the servers take so long for each answer."""
    for server in servers.servers:
        answer = server._answer

        def slowly(*args: Any, answer: Any = answer) -> Any:
            clock.now_s += seconds
            return answer(*args)

        server._answer = slowly  # type: ignore[method-assign]


def test_a_worker_waited_as_long_as_its_servers_took_and_not_while_it_computed() -> None:
    plan, clock = Plan(), Clock()
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0), clock=clock)
    client = worker.client
    computes = threading.Event()

    def slowly(answer: Any, *args: Any) -> Any:
        while not (client._is_waiting or computes.is_set()):  # a quick server answers before anybody waits
            computes.wait(0.001)
        clock.now_s += 0.25
        return answer(*args)

    for server in servers.servers:
        server._answer = partial(slowly, server._answer)  # type: ignore[method-assign]
    client.hello()
    order = client.next()
    client.pull()
    assert isinstance(order, Compute)
    assert client.waited_s == 0.75
    computes.set()
    loss_sum, push = worker.compute(order)
    clock.now_s += 10.0
    under_way = client.start_push([order], worker.flat.gradient, loss_sums=[loss_sum], **push)
    for asked in under_way.asked:  # answered while the worker computes the next
        assert asked.header is not None
        asked.header.wait(JOIN_S)
    clock.now_s += 10.0
    under_way.wait()
    under_way.wait()
    assert client.waited_s == 0.75
    assert clock.now_s == 21.0
    client.close()
    servers.close()


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_worker_also_waits_for_the_server_that_takes_a_lost_ones_place_and_each_second_counts_once(
    fails_at: int,
) -> None:
    plan, clock = Plan(), Clock()
    servers = Servers(plan)

    def another(shard: int, error: Exception) -> Channel:
        clock.now_s += 3.0
        return servers.channel(shard, 0)

    channel = servers.channel(0, 0, left_faults=FaultScript().fail_at(fails_at))
    worker = Worker(plan, 0, [channel], clock=clock, replace=another)
    worker.client.hello()
    for _ in range(3):
        worker.client.pull()
        clock.now_s += 1.0
    assert worker.client.waited_s == 3.0
    worker.client.close()
    servers.close()


def test_what_a_worker_waited_and_saved_is_kept_when_it_is_employed_again(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    part = worker_host.CentralWorker.part

    def noted(self: Any) -> None:
        before = (self.waited_s, self.bytes_saved)
        part(self)
        assert (self.waited_s, self.bytes_saved) == before
        told.append({"waited_s": before[0], "saved_bytes": before[1]})

    settings = central_settings(2, {"persist": True}, steps=30, precision="float32")
    settings = replace(settings, compression={"type": "onebit", "error_feedback": True})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker_host.CentralWorker, "part", noted)
        train_through_a_loss_of_all_servers(few_digits, settings, tmp_path, after_lines=7)
    assert [one["saved_bytes"] > 0 for one in told] == [False, False, True, True]
    assert [one["waited_s"] > 0 for one in told] == [False, False, True, True]


def test_a_worker_that_has_not_been_employed_has_used_nothing() -> None:
    settings = central_settings(1, steps=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(task_host.tasks, "build", lambda _: digits(hidden=[8]))
        host = worker_host.WorkerHost(settings)
    assert (host.usage()["shares"], host.usage()["waited_s"], host.usage()["saved_bytes"]) == (0, 0.0, 0)
    host.close()

"""Whole runs under parameter servers: the hosts of servers and workers, as they are in actors, in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from orchestray.platform.process import gc_control
from orchestray.platform.run.model_files import load_model_tensors
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop import task_host
from orchestray.trainers.ps.hosts import server_host, worker_host
from orchestray.trainers.ps.protocol.address import Address
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.variants.hierarchy import leaf_host
from orchestray.trainers.ps.worker.client import ShardClient
from support.layouts import layout_settings
from support.patience import PATIENCE_S

HOST = "127.0.0.1"


@dataclass
class CentralRun:
    """Files, weights and answers that a run leaves."""

    lines: list[dict[str, Any]]
    weights: dict[str, Tensor]
    outcome: Outcome
    workers: list[dict[str, Any]]
    servers: list[dict[str, Any]] = field(default_factory=list)
    """Resources that each server has used, and each leaf server."""

    @property
    def moved(self) -> list[int]:
        """Bytes that each server counted, and each leaf server."""
        return [one["bytes"] for one in self.servers]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "split" not in line]


def central_settings(data: int = 2, exchange: Mapping[str, Any] | None = None, **train: Any) -> ReplicaSettings:
    chosen = {"type": "parameter_server", **(exchange or {})}
    return layout_settings({"data": data}, chosen, **train)


@gc_control.pause()  # see `in_threads`
def train_central(
    task: Callable[[], Any],
    settings: ReplicaSettings,
    directory: Path,
    *,
    checkpoint: Any = None,
    replaces: type[BaseException] | tuple[()] = (),
) -> CentralRun:
    """Train to the end.

    Args:
        directory: where the model goes.
        checkpoint: to go on from.
        replaces: what a worker dies of: another one takes its place, as the driver sees to it.
    """
    settings = replace(settings, model_directory=str(directory / "model"))
    num_servers = settings.exchange["shards"]
    with (
        mock.patch.object(server_host.tasks, "build", side_effect=lambda _: task()),
        mock.patch.object(task_host.tasks, "build", side_effect=lambda _: task()),
        mock.patch.object(leaf_host.tasks, "build", side_effect=lambda _: task()),
    ):
        servers = [server_host.ServerHost(settings) for _ in range(num_servers)]
        workers = [worker_host.WorkerHost(settings) for _ in range(settings.layout.data)]
        leaves = [leaf_host.LeafHost(settings) for _ in range(CentralSettings.of(settings).num_leaves)]
    start = Start(time.time(), checkpoint)
    ports = [server.begin(rank, start, HOST) for rank, server in enumerate(servers)]
    answers: list[Any] = [None] * len(workers)
    leaf_ports = _begin_leaves(leaves, servers, ports, start)

    def employ(rank: int, attempt: int) -> Any:
        name = f"worker-{rank}-{attempt}"
        if leaves:
            number = rank % len(leaves)
            return workers[rank].train(rank, attempt, _met([leaves[number]], [leaf_ports[number]], rank, name))
        return workers[rank].train(rank, attempt, _met(servers, ports, rank, name))

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        attempt = 0
        while True:
            try:
                answers[rank] = employ(rank, attempt)
            except replaces:
                attempt += 1
                with mock.patch.object(task_host.tasks, "build", side_effect=lambda _: task()):
                    workers[rank] = worker_host.WorkerHost(settings)
                continue
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
                answers[rank] = error
                begin.abort()
            return

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(workers))]
    with _side_by_side(len(workers)) as begin:
        for thread in threads:
            thread.start()
        _join(threads)
    try:
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        lines = [line for line in servers[0].drain(0.0, 0.0, 0) if "event" not in line]
        outcome = servers[0].outcome()
        workers[0].save_model(outcome.step)
        usage = [worker.usage() for worker in workers]
        used = [host.usage() for host in (*servers, *leaves)]
        return CentralRun(lines, load_model_tensors(str(directory / "model")), outcome, usage, used)
    finally:
        for host in (*workers, *leaves, *servers):
            host.close()


@contextlib.contextmanager
def _side_by_side(num_workers: int) -> Iterator[threading.Barrier]:
    """Let workers begin when all have met the servers: else the first, on a busy machine, could do all alone."""
    begin = threading.Barrier(num_workers, timeout=PATIENCE_S)
    hello, known = ShardClient.hello, set[int]()

    def together(client: ShardClient, **given: Any) -> None:
        hello(client, **given)
        if threading.get_ident() not in known:
            known.add(threading.get_ident())
            begin.wait()

    with mock.patch.object(ShardClient, "hello", together):
        yield begin


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a worker hangs"


def _met(hosts: Sequence[Any], ports: Sequence[int], number: int, name: str) -> list[Address]:
    """Have all hosts expect the member of this number from now on, and return their addresses."""
    for host in hosts:
        host.accept(number, name)
    return [Address(HOST, port, name) for port in ports]


def _begin_leaves(leaves: Sequence[Any], servers: Sequence[Any], ports: Sequence[int], start: Start) -> list[int]:
    """Connect leaf servers with the shards; the ports where workers meet them."""
    total_steps = servers[0].describe()["total_steps"]
    return [
        leaf.begin(number, start, HOST, _met(servers, ports, -1 - number, f"leaf-{number}"), total_steps)
        for number, leaf in enumerate(leaves)
    ]


@gc_control.pause()  # see `in_threads`
def train_with_a_lost_worker(
    task: Callable[[], Any], settings: ReplicaSettings, directory: Path, *, after_lines: int, lines_alone: int = 0
) -> CentralRun:
    """Train like `train_central` with two workers, of which the second is lost.

    It is cut off when the lead has recorded `after_lines` lines, and replaced after `lines_alone` more.
    """
    settings = replace(settings, model_directory=str(directory / "model"))
    with (
        mock.patch.object(server_host.tasks, "build", side_effect=lambda _: task()),
        mock.patch.object(task_host.tasks, "build", side_effect=lambda _: task()),
    ):
        servers = [server_host.ServerHost(settings) for _ in range(settings.exchange["shards"])]
        workers = [worker_host.WorkerHost(settings) for _ in range(3)]
    ports = [server.begin(rank, Start(time.time(), None), HOST) for rank, server in enumerate(servers)]
    answers: dict[str, Any] = {}

    def employ(number: int, rank: int) -> threading.Thread:
        name = f"worker-{number}"

        def work() -> None:
            torch.set_num_threads(1)
            answers[name] = workers[number].train(rank, 0, [Address(HOST, port, name) for port in ports])

        for server in servers:
            server.accept(rank, name)
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    threads = [employ(0, 0), employ(1, 1)]
    lines: list[dict[str, Any]] = []
    while len(lines) < after_lines:
        lines += [line for line in servers[0].drain(1.0, 0.0, 0) if "event" not in line]
    workers[1].abort()
    until_s, wanted = time.monotonic() + PATIENCE_S, len(lines) + lines_alone
    while len(lines) < wanted:
        assert time.monotonic() < until_s, "the other does not go on alone"
        lines += [line for line in servers[0].drain(1.0, 0.0, 0) if "event" not in line]
    threads.append(employ(2, 1))
    _join(threads)
    try:
        lines += [line for line in servers[0].drain(0.0, 0.0, 0) if "event" not in line]
        outcome = servers[0].outcome()
        workers[0].save_model(outcome.step)
        weights = load_model_tensors(str(directory / "model"))
        return CentralRun(lines, weights, outcome, [worker.usage() for worker in workers])
    finally:
        for host in (*workers, *servers):
            host.close()


@gc_control.pause()  # see `in_threads`
def train_through_a_loss_of_all_servers(
    task: Callable[[], Any], settings: ReplicaSettings, directory: Path, *, after_lines: int
) -> CentralRun:
    """Train like `train_central` with two workers, through a loss of all servers.

    After `after_lines` lines every connection ends, and new servers begin. No checkpoint is written: what the servers
    know is on disk, or gone.
    """
    settings = replace(settings, model_directory=str(directory / "model"))
    lines: dict[int, dict[str, Any]] = {}
    answers: dict[int, Any] = {}
    with (
        mock.patch.object(server_host.tasks, "build", side_effect=lambda _: task()),
        mock.patch.object(task_host.tasks, "build", side_effect=lambda _: task()),
    ):
        workers = [worker_host.WorkerHost(settings) for _ in range(2)]
        for attempt in range(2):
            servers = [server_host.ServerHost(settings) for _ in range(settings.exchange["shards"])]
            start = Start(time.time(), None, attempt)
            ports = [server.begin(rank, start, HOST) for rank, server in enumerate(servers)]

            def work(rank: int, ports: list[int] = ports, attempt: int = attempt) -> None:
                torch.set_num_threads(1)
                met = [Address(HOST, port, f"worker-{rank}-{attempt}") for port in ports]
                answers[rank] = workers[rank].train(rank, attempt, met)

            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
            for rank, thread in enumerate(threads):
                for server in servers:
                    server.accept(rank, f"worker-{rank}-{attempt}")
                thread.start()
            while attempt == 0 and len(lines) < after_lines:
                lines |= {line["step"]: line for line in servers[0].drain(1.0, 0.0, 0) if "event" not in line}
            if attempt == 0:
                for server in servers:
                    server.abort()
            _join(threads)
            told = servers[0].drain(0.0, 0.0, 0) if attempt else []
            lines |= {line["step"]: line for line in told if "event" not in line and "split" not in line}
            if attempt == 0:
                for server in servers:
                    server.close()
    outcome = servers[0].outcome()
    workers[0].save_model(outcome.step)
    for host in (*workers, *servers):
        host.close()
    weights = load_model_tensors(str(directory / "model"))
    return CentralRun([lines[step] for step in sorted(lines)], weights, outcome, [])

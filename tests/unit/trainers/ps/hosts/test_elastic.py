"""Workers that join and leave a run under parameter servers: every sample once, and the others are not disturbed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from orchestray.platform.run.model_files import load_model_tensors
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.loop import task_host
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.hosts import server_host, worker_host
from orchestray.trainers.ps.protocol.address import SERVER_LOST, Address
from orchestray.trainers.ps.protocol.assignments import Compute
from support.central_run import HOST, central_settings
from support.layouts import layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.tiny_task import TinyTask
from support.training import furthest

TIMEOUT_S = PATIENCE_S
ASYNCHRONOUS = {"consistency": "asynchronous"}


class Elastic:
    """A run whose workers come and go while worker 0 is about to compute a share of certain steps."""

    def __init__(self, settings: ReplicaSettings, directory: Path, changes: dict[int, int]) -> None:
        self.settings = replace(settings, model_directory=str(directory / "model"))
        self.changes = dict(changes)
        """The number of workers from a step on."""
        self.acknowledged: list[tuple[int, Compute]] = []
        self.answers: dict[int, Any] = {}
        self.reads: dict[int, int] = {}
        """Updates that the parameters held which each worker's first share was computed with."""
        self.waits_for_shares = False
        """True if worker 0 goes on only once all workers have done a share."""
        self._workers: list[worker_host.WorkerHost] = []
        self._threads: list[threading.Thread] = []
        self._num_meetings = 0
        with mock.patch.object(server_host.tasks, "build", side_effect=lambda _: TinyTask()):
            self._servers = [server_host.ServerHost(self.settings) for _ in range(settings.exchange["shards"])]
            self._spare_workers = [worker_host_of(self.settings) for _ in range(4)]
        start = Start(time.time())
        self._ports = [server.begin(rank, start, HOST) for rank, server in enumerate(self._servers)]
        self._listen()

    def run(self) -> tuple[list[float], dict[str, Tensor]]:
        """Return the losses by step, and the weights at the end."""
        try:
            for _ in range(self.settings.layout.data):
                self._join()
            for thread in self._threads:  # grows on the way
                thread.join(TIMEOUT_S)
            raised = [answer for answer in self.answers.values() if isinstance(answer, BaseException)]
            if raised:
                raise raised[0]
            lines = self._servers[0].drain(0.0, 0.0, 0)
            outcome = self._servers[0].outcome()
            self._workers[0].save_model(outcome.step)
            losses = [line["loss"] for line in lines if "event" not in line and "split" not in line]
            return losses, load_model_tensors(str(self.settings.model_directory))
        finally:
            for host in (*self._spare_workers, *self._workers, *self._servers):
                host.close()

    @property
    def _ledger(self) -> Coordinator:
        assert self._servers[0]._server is not None
        return self._servers[0]._server.machine.lead

    def _listen(self) -> None:
        coordinator = self._ledger
        acknowledge = coordinator.acknowledge

        def listened(worker: int, order_id: int, *arguments: Any, **named: Any) -> Any:
            share = coordinator._scheduler.shares.get(order_id)
            ack = acknowledge(worker, order_id, *arguments, **named)
            if ack.counts and share is not None:
                self.acknowledged.append((worker, share.order))
                self.reads.setdefault(worker, named["read_version"])
            return ack

        coordinator.acknowledge = listened  # type: ignore[method-assign]

    def _join(self) -> None:
        rank, host = len(self._workers), self._spare_workers.pop()
        self._workers.append(host)
        self._num_meetings += 1
        name = f"worker-{rank}-{self._num_meetings}"
        if rank == 0:
            host._worker._compute = self._changing(host._worker._compute)  # type: ignore[method-assign]
        for server in self._servers:
            server.accept(rank, name)

        def work() -> None:
            torch.set_num_threads(1)
            try:
                self.answers[rank] = host.train(rank, 0, [Address(HOST, port, name) for port in self._ports])
            except BaseException as error:  # noqa: BLE001 - raised by `run`, in the test's thread
                self.answers[rank] = error

        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _changing(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(order: Compute, reader: Any) -> Any:
            for step in [step for step in sorted(self.changes) if step <= order.step]:
                self._change(self.changes.pop(step))
            return compute(order, reader)

        return computed

    def _change(self, num_workers: int) -> None:
        """Change the number of workers as the driver does; return once the coordinator knows of it."""
        for _ in range(len(self._workers), num_workers):
            self._join()
        self._servers[0].resize(num_workers)
        for rank, host in list(enumerate(self._workers))[num_workers:]:
            if self.settings.has_residual:
                self._servers[0].dismiss(rank)
            else:
                host.leave()
        del self._workers[num_workers:]
        server = self._servers[0]._server
        assert server is not None
        everybody = set(range(num_workers))
        with server._changed:
            if self.waits_for_shares:
                assert server._changed.wait_for(lambda: everybody <= self.reads.keys(), TIMEOUT_S)
            assert server._changed.wait_for(lambda: set(self._ledger.workers) == everybody, TIMEOUT_S)


def worker_host_of(settings: ReplicaSettings) -> worker_host.WorkerHost:
    with mock.patch.object(task_host.tasks, "build", side_effect=lambda _: TinyTask()):
        return worker_host.WorkerHost(settings)


def samples_used(run: Elastic) -> Counter[tuple[int, int]]:
    """Count how often each (epoch, position in its order) was in a share that is applied."""
    used: Counter[tuple[int, int]] = Counter()
    for _, order in run.acknowledged:
        for start, stop in order.pieces:
            used.update((order.epoch, position) for position in range(start, stop))
    return used


OPTIMIZER = {"type": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("exchange", [{}, {"shards": 2}, {"consistency": "stale", "staleness": 0}], ids=str)
def test_a_synchronous_run_of_2_then_4_then_1_workers_is_the_single_process(
    exchange: dict[str, Any], tmp_path: Path
) -> None:
    train = {"steps": None, "epochs": 6, "batch_size": 16, "optimizer": OPTIMIZER}
    one = train_laid_out(TinyTask, layout_settings(**train))
    run = Elastic(central_settings(2, exchange, **train), tmp_path, {5: 4, 14: 1})
    losses, weights = run.run()
    assert losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(weights, one.weights) <= 1e-12
    assert samples_used(run) == Counter((epoch, sample) for epoch in range(6) for sample in range(37))
    assert run.answers == {0: "finished", 1: SERVER_LOST, 2: SERVER_LOST, 3: SERVER_LOST}
    assert {worker for worker, order in run.acknowledged if order.step < 5} <= {0, 1}
    assert {worker for worker, order in run.acknowledged if order.step > 14} == {0}


@pytest.mark.parametrize("exchange", [{}, {"shards": 2}, {**ASYNCHRONOUS, "push_every": 3}], ids=str)
def test_what_a_leaving_worker_has_not_sent_comes_into_the_weights(exchange: dict[str, Any], tmp_path: Path) -> None:
    train = {"steps": 20, "batch_size": 16, "optimizer": {"type": "sgd", "lr": 0.1}}
    never = {"type": "threshold", "threshold": 1e9, "error_feedback": True}
    found = []
    for changes in ({}, {9: 1}):
        run = Elastic(replace(central_settings(2, exchange, **train), compression=never), tmp_path, dict(changes))
        found.append(run.run()[1])
        assert run.answers == {0: "finished", 1: "left" if changes else "finished"}
    assert furthest(found[0], found[1]) > 1e-3  # without it nothing is ever sent


def test_so_it_is_with_shares_by_speed(tmp_path: Path) -> None:
    train = {"steps": None, "epochs": 6, "batch_size": 16, "optimizer": OPTIMIZER}
    one = train_laid_out(TinyTask, layout_settings(**train))
    run = Elastic(central_settings(2, {"balance": "speed"}, **train), tmp_path, {5: 4, 14: 1})
    losses, weights = run.run()
    assert losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(weights, one.weights) <= 1e-12
    assert samples_used(run) == Counter((epoch, sample) for epoch in range(6) for sample in range(37))


@pytest.mark.parametrize(
    "exchange",
    [
        {"consistency": "stale", "staleness": 2},
        {"consistency": "stale", "staleness": 2, "balance": "speed"},
        ASYNCHRONOUS,
        {**ASYNCHRONOUS, "push_every": 3},
        {**ASYNCHRONOUS, "overlap": True, "shards": 2},
    ],
    ids=str,
)
def test_every_sample_of_every_epoch_is_used_once_through_2_4_and_1_workers(
    exchange: dict[str, Any], tmp_path: Path
) -> None:
    epochs = 6
    settings = central_settings(2, exchange, steps=None, epochs=epochs, batch_size=16, optimizer=OPTIMIZER)
    run = Elastic(settings, tmp_path, {5: 4, 14: 1})
    losses, _ = run.run()
    assert samples_used(run) == Counter((epoch, sample) for epoch in range(epochs) for sample in range(37))
    assert len(losses) == epochs * 3
    assert sum(losses[-3:]) < sum(losses[:3])  # it goes on to learn


def test_the_first_batch_after_a_change_is_cut_for_the_new_number_of_workers(tmp_path: Path) -> None:
    settings = central_settings(2, steps=20, batch_size=16, optimizer=OPTIMIZER)
    run = Elastic(settings, tmp_path, {5: 4, 14: 1})
    run.run()
    cut = {order.step: order.num_shares for _, order in run.acknowledged}
    # The batch in which the change was asked for had begun.
    assert [cut[step] for step in (5, 6, 14, 15)] == [2, 4, 4, 1]


def test_a_worker_that_joins_computes_its_first_share_with_the_parameters_of_the_servers(tmp_path: Path) -> None:
    settings = central_settings(1, ASYNCHRONOUS, steps=40, batch_size=16, optimizer=OPTIMIZER)
    run = Elastic(settings, tmp_path, {20: 2})
    run.waits_for_shares = True
    run.run()
    assert run.reads[0] == 0
    assert run.reads[1] >= 19

"""Models that write to their parameters when they are used, under servers whose memory workers look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.ps.protocol.partition import FlatModel
from orchestray.trainers.ps.protocol.requests import Traffic
from orchestray.trainers.ps.worker import worker as central_worker
from orchestray.trainers.ps.worker.client import ShardClient
from orchestray.trainers.ps.worker.in_place_writes import InPlaceWrites
from support.central import Plan, Servers, Worker
from support.central_run import CentralRun, central_settings, train_central
from support.training import digits, same_bits


class Writing(nn.Linear):
    """A linear layer that changes its weight in the forward passes from a given one on."""

    def __init__(self, write: Callable[[nn.Parameter], object], first: int) -> None:
        super().__init__(64, 512)
        self._write, self._first, self._num_passes = write, first, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._num_passes += self.training
        if self._num_passes >= self._first:
            self._write(self.weight)
        return super().forward(inputs)


@torch.no_grad()
def clamp(weight: nn.Parameter) -> None:
    weight.clamp_(-0.05, 0.05)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def leave(weight: nn.Parameter) -> None:
    pass


def task(write: Callable[[nn.Parameter], object], first: int) -> Any:
    class Task(type(digits())):  # type: ignore[misc]
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), Writing(write, first), nn.ReLU(), nn.Linear(512, 10))

    return Task()


def trained(write: Callable[[nn.Parameter], object], first: int, directory: Path) -> tuple[CentralRun, list[str], int]:
    """Train with one worker; return what the run leaves, its warnings, and a count of its shares.

    The count is of those for which the worker looked at a server's memory.
    """
    warnings: list[str] = []
    looked: list[bool] = []
    compute, warn = central_worker.CentralWorker._gradient, ShardClient.warn

    def noted(self: Any, *args: Any) -> Any:
        looked.append(self.client.values is not self.client.home)
        return compute(self, *args)

    def told(self: Any, text: str) -> None:
        warnings.append(text)
        warn(self, text)

    settings = central_settings(1, {"consistency": "asynchronous"}, steps=8, optimizer={"type": "sgd", "lr": 0.1})
    with (
        mock.patch.object(central_worker.CentralWorker, "_gradient", noted),
        mock.patch.object(ShardClient, "warn", told),
    ):
        found = train_central(lambda: task(write, first), replace(settings, accumulate=1), directory)
    return found, warnings, sum(looked)


@pytest.mark.parametrize(
    ("write", "first", "num_looked"),
    [(clamp, 1, 0), (clamp_data, 1, 0), (clamp, 4, 3), (clamp_data, 4, 7), (leave, 1, 7)],
    ids=["from the start", "past autograd", "later", "past autograd, later", "never"],
)
def test_what_a_model_writes_to_its_parameters_reaches_no_server(
    write: Callable[[nn.Parameter], object], first: int, num_looked: int, tmp_path: Path
) -> None:
    lent, warnings, looked = trained(write, first, tmp_path / "lent")
    with mock.patch.object(central_worker, "_LARGE_BYTES", 1 << 40):
        copied, _, never = trained(write, first, tmp_path / "copied")
    assert (looked, never) == (num_looked, 0)
    assert same_bits(lent.weights, copied.weights)
    assert lent.losses == copied.losses
    is_seen = write is clamp or num_looked == 0
    assert [("writes to its parameters ('1.weight')" in text) for text in warnings] == [True] * is_seen


def test_a_user_is_warned_once_of_a_model_that_writes_to_its_parameters(tmp_path: Path) -> None:
    recorded: list[dict[str, Any]] = []
    record = Recorder.record

    def noted(self: Any, line: dict[str, Any]) -> None:
        recorded.append(line)
        record(self, line)

    with mock.patch.object(Recorder, "record", noted):
        settings = central_settings(2, {"consistency": "synchronous"}, steps=3)
        train_central(lambda: task(clamp, 1), settings, tmp_path)
    texts = {line["text"] for line in recorded if line.get("event") == "warning"}
    assert len(texts) == 1
    assert "Parameter servers get gradients alone" in texts.pop()


@pytest.mark.parametrize("past_autograd", [False, True])
def test_a_watch_names_each_parameter_that_was_written_to_once(past_autograd: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = FlatModel(model)
    watch = InPlaceWrites(list(model.named_parameters()))
    with torch.no_grad():
        model[0].bias[0] = float("nan")  # equal to itself, as bits are
    watch.begin(flat.values)
    with torch.no_grad():
        (model[1].weight.data if past_autograd else model[1].weight).mul_(2)
    assert watch.end(flat.values) == ["1.weight"]
    for expected in (["0.weight"], []):
        watch.begin(flat.values)
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[1].weight.mul_(2)
        assert watch.end(flat.values) == expected
    assert watch.written == {"0.weight", "1.weight"}


def test_a_worker_that_looks_no_longer_gives_the_servers_memory_back() -> None:
    plan = Plan(lends=True)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0), stays_there=True)
    worker.client.hello()
    worker.client.pull()
    shard = servers.machines[0].shard
    assert worker.client.values is not worker.client.home
    assert shard._lent
    held = worker.client.values.clone()
    worker.client.stays_there = False
    assert worker.client.values is worker.client.home
    assert torch.equal(worker.client.home, held)
    worker.client.pull()
    assert not shard._lent
    worker.client.close()
    servers.close()


def test_a_warning_is_told_again_to_the_server_that_takes_over() -> None:
    plan = Plan()
    servers = Servers(plan)
    client = Worker(plan, 0, servers.channels(0)).client
    client.hello()
    client.warn("A model that writes.")
    assert [client._tally(), client._tally()] == [Traffic(warnings=("A model that writes.",)), None]
    client.reconnect(0, servers.channel(0, 0))
    told = client._tally()
    assert told is not None
    assert told.warnings == ("A model that writes.",)
    client.close()
    servers.close()

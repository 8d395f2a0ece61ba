"""The process of a parameter server: what it goes on from when others of its run were lost."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint import latest_good
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.ps.hosts import server_host
from orchestray.trainers.ps.hosts.server_host import ServerHost
from orchestray.trainers.ps.hosts.worker_host import WorkerHost
from orchestray.trainers.ps.protocol.address import Address
from orchestray.trainers.ps.server.softsync import Softsync
from support.central_run import HOST, central_settings, train_central
from support.patience import PATIENCE_S
from support.training import digits, same_bits

STEPS = 6


@pytest.fixture(autouse=True)
def _small_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_host.tasks, "build", lambda _: digits(hidden=[8]))


class Hosts:
    """Servers and a worker as the driver has them, in one process."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.num_meetings = 0
        self.open: list[Any] = []

    def server(self, rank: int, attempt: int = 0, checkpoint: Any = None) -> tuple[ServerHost, int]:
        host = ServerHost(self.settings)
        self.open.append(host)
        return host, host.begin(rank, Start(time.time(), checkpoint, attempt), HOST)

    def meet(self, host: ServerHost, port: int) -> Address:
        self.num_meetings += 1
        name = f"worker-0-{self.num_meetings}"
        host.accept(0, name)
        return Address(HOST, port, name)

    def train(self, *servers: tuple[ServerHost, int]) -> None:
        """Train to the end, with one worker."""
        worker = WorkerHost(self.settings)
        self.open.append(worker)
        answers: list[str] = []
        addresses = [self.meet(*server) for server in servers]
        thread = threading.Thread(target=lambda: answers.append(worker.train(0, 0, addresses)))
        thread.start()
        thread.join(PATIENCE_S)
        assert answers == ["finished"]

    def lose_all(self) -> None:
        for host in self.open:
            host.abort()
        for host in self.open:
            host.close()
        self.open.clear()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    exchange = {"replicas": 2, "persist": True}
    settings = central_settings(1, exchange, steps=STEPS)
    storage, model = str(tmp_path / "checkpoints"), str(tmp_path / "model")
    made = Hosts(replace(settings, checkpoint_storage=storage, checkpoint_every_steps=STEPS, model_directory=model))
    yield made
    made.lose_all()


def test_what_a_copy_has_acknowledged_since_it_took_over_is_there_when_all_servers_are_lost_later(hosts: Hosts) -> None:
    torch.set_num_threads(1)
    (primary, _), (copy, port) = hosts.server(0), hosts.server(1)
    copy.follow("copy-1-1")
    primary.replicate(Address(HOST, port, "copy-1-1"))
    primary.resize(1)  # answered when the copy has it
    primary.close()
    hosts.train((copy, copy.promote()))
    hosts.lose_all()
    server, _ = hosts.server(0, attempt=1)
    assert server.outcome().step == STEPS


def test_a_copy_takes_what_workers_measured_for_its_server(hosts: Hosts) -> None:
    torch.set_num_threads(1)
    hosts.settings = replace(hosts.settings, optimizer={"type": "kfac", "lr": 0.05, "inverse_every_steps": 4})
    (primary, primary_port), (copy, port) = hosts.server(0), hosts.server(1)
    copy.follow("copy-1-1")
    primary.replicate(Address(HOST, port, "copy-1-1"))
    hosts.train((primary, primary_port))
    primary.resize(1)  # answered when the copy has all that was before
    assert primary._server is not None
    found = primary._server.machine.shard.tensors()
    assert {"optimizer/0.weight:0.inputs", "optimizer/2.bias:0.momentum_buffer"} <= found.keys()
    copy.promote()
    assert copy._server is not None
    assert same_bits(copy._server.machine.shard.tensors(), found)


def test_copies_are_sent_states_over_connections_of_their_own_and_a_worker_feels_no_flood_of_them(
    hosts: Hosts, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    hosts.settings = replace(hosts.settings, optimizer={"type": "sgd", "lr": 0.1})
    of_worker = []
    for num_copies in (0, 1, 6):
        hosts.settings = replace(
            hosts.settings, checkpoint_storage=str(tmp_path / str(num_copies))
        )  # each from the start
        primary, primary_port = hosts.server(0)
        assert primary._server is not None
        machine = primary._server.machine
        state_bytes = sum(tensor.nbytes for tensor in machine.state()[1].values())
        for number in range(num_copies):
            copy, port = hosts.server(1)
            copy.follow(f"copy-1-{number}")
            primary.replicate(Address(HOST, port, f"copy-1-{number}"))
        hosts.train((primary, primary_port))
        used = primary.usage()
        assert used.get("replicated_bytes", 0) == num_copies * (state_bytes + STEPS * machine.shard.values.nbytes)
        of_worker.append(used["bytes"] - used.get("replicated_bytes", 0))
        assert len({id(channel) for channel in primary._channels}) == 1 + num_copies
        hosts.lose_all()
    assert of_worker[0] == of_worker[1] == of_worker[2] > 0


def test_a_log_that_ends_before_the_checkpoint_is_refused(hosts: Hosts) -> None:
    torch.set_num_threads(1)
    hosts.server(0)
    hosts.lose_all()  # its log stays behind
    elsewhere = Hosts(replace(hosts.settings, model_directory=str(Path(hosts.settings.model_directory or "") / "else")))
    elsewhere.train(elsewhere.server(0))
    elsewhere.lose_all()
    checkpoint, _ = latest_good(hosts.settings.checkpoint_storage or "")
    with pytest.raises(CheckpointError, match=r"ends before the checkpoint of step 6"):
        hosts.server(0, attempt=1, checkpoint=checkpoint)


def test_what_both_the_log_and_the_checkpoint_tell_of_counts_once(hosts: Hosts) -> None:
    torch.set_num_threads(1)
    hosts.settings = replace(hosts.settings, checkpoint_every_steps=4)
    server, port = hosts.server(0)
    hosts.train((server, port))
    whole = server.outcome()
    hosts.lose_all()
    assert hosts.settings.checkpoint_storage is not None
    (last,) = Path(hosts.settings.checkpoint_storage).glob(f"*{STEPS}")
    shutil.rmtree(last)  # the log alone knows of the last steps
    again, _ = hosts.server(0, attempt=1)
    told = again.drain(0.0, 0.0, 0)
    assert (told[0]["event"], told[0]["step"]) == (
        "agreed",
        STEPS,
    )  # first: it has the checkpoint's lines
    assert [line["step"] for line in told if "event" not in line and "split" not in line] == [5, 6]
    assert [line["step"] for line in told if line.get("event") == "checkpoint_saved"] == [6]
    assert again.outcome().final == whole.final


def test_a_pattern_of_names_that_no_parameter_has_is_refused_as_the_servers_begin() -> None:
    groups = [{"match": "*.biass", "lr": 0.1}]
    settings = central_settings(1, {}, steps=1, optimizer={"type": "sgd", "lr": 0.1, "groups": groups})
    host = ServerHost(settings)
    with pytest.raises(ConfigError, match=r"groups\.0\.match: no parameter has a name like '\*\.biass'"):
        host.begin(0, Start(0.0), HOST)
    host.close()


def test_a_server_makes_an_update_of_as_many_pushes_as_softsync_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = Softsync.take

    def counted(sums: Softsync) -> Any:
        taken.append(len(sums._parts))
        return take(sums)

    monkeypatch.setattr(Softsync, "take", counted)
    settings = central_settings(2, {"consistency": "asynchronous", "softsync": 1}, steps=STEPS)
    train_central(lambda: digits(hidden=[8]), settings, tmp_path)
    assert taken == [2] * STEPS

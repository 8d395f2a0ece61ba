"""Whole runs of replicas in stages: the hosts of servers and stages, as they are in actors, in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from orchestray.platform.run.model_files import load_model_tensors
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.ps.hosts import server_host
from orchestray.trainers.ps.protocol.address import Address, StagePlan
from orchestray.trainers.ps.variants.model_parallel import host as stage_host
from orchestray.trainers.ps.variants.model_parallel import worker
from support.central import run_all
from support.central_run import HOST, CentralRun
from support.layouts import layout_settings
from support.patience import PATIENCE_S


def staged_settings(
    network: Mapping[str, Any], exchange: Mapping[str, Any] | None = None, **train: Any
) -> ReplicaSettings:
    size = network.get("pipeline", 1) * network.get("tensor", 1)
    return layout_settings(network, {"type": "parameter_server", "shards": size, **(exchange or {})}, **train)


class Hosts:
    """The processes of a run: servers that serve, and stages that train when a method is called."""

    def __init__(self, task: Callable[[], Any], settings: ReplicaSettings) -> None:
        with mock.patch.object(server_host.tasks, "build", side_effect=lambda _: task()):
            self.servers = [server_host.ServerHost(settings) for _ in range(settings.exchange["shards"])]
            self.stages = [stage_host.StageHost(settings) for _ in range(settings.layout.size)]
        self.settings = settings
        self.plan: StagePlan = self.stages[0].plan()
        start = Start(time.time(), None)
        self.ports = [server.begin(rank, start, HOST, None, self.plan) for rank, server in enumerate(self.servers)]

    def train(self, rank: int, meeting: str) -> str:
        """Have a stage work, and return its answer."""
        torch.set_num_threads(1)
        size = self.settings.layout.model_size
        replica, stage = divmod(rank, size)
        each = len(self.servers) // size
        own, name = range(stage * each, (stage + 1) * each), f"{meeting}-{replica}"
        for shard in own:
            self.servers[shard].accept(replica, name)
        addresses = [Address(HOST, self.ports[shard], name) for shard in own]
        return self.stages[rank].train(
            rank, 0, addresses, Address(HOST, self.ports[0], f"meeting-{meeting}-{replica}"), self.plan
        )

    def close(self) -> None:
        for host in (*self.stages, *self.servers):
            host.close()


def train_staged(task: Callable[[], Any], settings: ReplicaSettings, directory: Path) -> CentralRun:
    """Train to the end; the model goes to a folder of `directory`."""
    settings = replace(settings, model_directory=str(directory / "model"))
    hosts = Hosts(task, settings)
    try:
        ranks = range(settings.layout.size)
        with mock.patch.object(worker, "Assembler", _built_together(settings.layout.size)):
            answers = run_all([lambda rank=rank: hosts.train(rank, "first") for rank in ranks])  # type: ignore[misc]
        assert set(answers) == {"finished"}
        lines = [line for line in hosts.servers[0].drain(0.0, 0.0, 0) if "event" not in line]
        outcome = hosts.servers[0].outcome()
        first = hosts.stages[: settings.layout.model_size]
        run_all([lambda stage=stage: stage.save_model(outcome.step) for stage in first])  # type: ignore[misc]
        usage = [stage.usage() for stage in hosts.stages]
        return CentralRun(lines, load_model_tensors(str(directory / "model")), outcome, usage)
    finally:
        hosts.close()


def _built_together(num_workers: int) -> type[Assembler]:
    """Return an assembler that waits until all models are built: to check a network it seeds the generator of all."""
    built = threading.Barrier(num_workers, timeout=PATIENCE_S)

    class BuiltTogether(Assembler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            built.wait()

    return BuiltTogether

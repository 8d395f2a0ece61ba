"""A worker under parameter servers, and what it needs around it: what a member of the gang of workers hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.channel.base import ChannelError
from orchestray.platform.run.checkpoint import save_model
from orchestray.trainers import tasks
from orchestray.trainers.central.address import SERVER_LOST, Address
from orchestray.trainers.central.employed import EmployedHost
from orchestray.trainers.central.hogwild import HogwildWorker, find_memory
from orchestray.trainers.central.orders import LEFT
from orchestray.trainers.central.settings import under_leaf
from orchestray.trainers.central.worker import CentralWorker
from orchestray.trainers.consolidation.distillation import learned_from
from orchestray.trainers.faults import FaultPlan, Faults
from orchestray.trainers.memory.process import peak_memory_bytes
from orchestray.trainers.model_json import describe_model
from orchestray.trainers.replica.device import device_of

if TYPE_CHECKING:
    from orchestray.trainers.replica.settings import ReplicaSettings


class WorkerHost(EmployedHost):
    """Builds task, data and model once, and works for the servers as often as it is told to."""

    def __init__(self, settings: ReplicaSettings) -> None:
        device = device_of(settings)
        double = settings.precision == "float64"
        task = learned_from(tasks.build(settings.task), settings.distill, double=double, device=device)
        super().__init__(settings, task, device)
        shares_memory = settings.exchange["transport"] == "shared_memory"
        make = HogwildWorker if shares_memory else CentralWorker
        self._worker = make(self._task, under_leaf(settings), self._stream, self._source("train"), device=device)

    def train(self, rank: int, attempt: int, servers: list[Address]) -> str:
        """Work until the lead says that there is nothing more to do; returns why, or `SERVER_LOST`.

        Args:
            rank: of this worker.
            attempt: how often it was killed on purpose before, see `FaultPlan.of`.
            servers: the primaries, in the order of shards; or this worker's leaf server.
        """
        self._hang_up()
        self._number, self._aborted = rank, False
        self._forget_earlier(servers)
        self._worker.part()
        plan = FaultPlan.of(
            self._settings.faults, "worker", rank, attempt=attempt, is_alone=True, seed=self._settings.seed
        )
        try:
            channels = [self._connect(server, shard) for shard, server in enumerate(servers)]
            if isinstance(self._worker, HogwildWorker):
                find_memory(self._worker, servers[0], channels[0])
            answer = self._worker.run(
                channels,
                rank,
                writer=self._prepare_checkpoints(),
                faults=Faults(plan),
                replace=self._await_server if self._worker.central.replicas > 1 else None,
            )
        except ChannelError:
            return SERVER_LOST
        except BaseException:
            self._hang_up()  # what this worker held goes back
            raise
        if answer == LEFT:
            self._hang_up()  # the others' next checkpoint waits for it no longer
        return answer

    def save_model(self, step: int) -> None:
        """Write the trained model, as the servers hold it after `step`, to the run's directory."""
        directory = self._settings.model_directory
        if directory:
            save_model(directory, self._worker.fetch(step), describe_model(self._settings, self._task))

    # -- beside it, from the driver ------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """What this worker did."""
        worker = self._worker
        return {
            "memory": peak_memory_bytes(torch.device("cpu")),
            "shares": worker.num_shares,
            "samples": worker.num_samples,
            "busy_s": round(worker.busy_s, 6),
            "waited_s": round(worker.waited_s, 6),
            "saved_bytes": worker.bytes_saved,
        }

"""The process of a worker under parameter servers, as a member of the gang of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.core.faults import Faults
from orchestray.trainers.ps.protocol.address import Address
from orchestray.trainers.ps.protocol.settings import under_leaf
from orchestray.trainers.ps.variants.hogwild.hogwild import HogwildWorker, find_memory
from orchestray.trainers.ps.worker.worker import CentralWorker
from orchestray.trainers.ps.worker.worker_process import EmployedHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.config.settings import ReplicaSettings


class WorkerHost(EmployedHost):
    """A host that builds task, data and model once, and works for the servers each time `train` is called."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        shares_memory = settings.exchange["transport"] == "shared_memory"
        make = HogwildWorker if shares_memory else CentralWorker
        self._worker = make(self._task, under_leaf(settings), self._stream, self._source("train"), device=self._device)

    def train(self, rank: int, attempt: int, servers: list[Address]) -> str:
        """Work until the lead has nothing more to do.

        Args:
            rank: rank of this worker.
            attempt: number of times it was killed on purpose before, see `FaultPlan.of`.
            servers: primaries, in the order of shards; or this worker's leaf server.

        Returns:
            The reason of the end, or `SERVER_LOST`.
        """
        self._hang_up()
        self._number, self._aborted = rank, False
        worker = self._worker
        worker.part()

        def work(channels: list[Channel], faults: Faults) -> str:
            if isinstance(worker, HogwildWorker):
                find_memory(worker, servers[0], channels[0])
            replace = self._await_server if worker.central.replicas > 1 else None
            return worker.run(channels, rank, writer=self._prepare_checkpoints(), faults=faults, replace=replace)

        return self._employ(rank, attempt, servers, work)

    def save_model(self, step: int) -> None:
        """Write the trained model, as the servers hold it after `step`, to the run's directory."""
        if self._settings.model_directory:
            self._write_model(self._worker.fetch(step))

    def _counts(self) -> Mapping[str, float]:
        return self._worker.counts()

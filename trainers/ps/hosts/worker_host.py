"""The process of a worker under parameter servers, as a member of the gang of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.comm.channel.base import ChannelError
from orchestray.trainers.core.faults import FaultPlan, Faults
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.loop.checkpoint_source import exported
from orchestray.trainers.ps.protocol.address import SERVER_LOST, Address
from orchestray.trainers.ps.protocol.assignments import LEFT
from orchestray.trainers.ps.protocol.settings import under_leaf
from orchestray.trainers.ps.variants.hogwild.hogwild import HogwildWorker, find_memory
from orchestray.trainers.ps.worker.worker import CentralWorker
from orchestray.trainers.ps.worker.worker_process import EmployedHost
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.trained_model import write_model

if TYPE_CHECKING:
    from collections.abc import Mapping

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
            self._hang_up()  # the lead hands out again what this worker held
            raise
        if answer == LEFT:
            self._hang_up()  # the others' next checkpoint must not wait for it
        return answer

    def save_model(self, step: int) -> None:
        """Write the trained model, as the servers hold it after `step`, to the run's directory."""
        directory = self._settings.model_directory
        if directory:
            trained = exported(self._settings, ModelState(self._worker.fetch(step)))
            described = describe_model(self._settings, self._task)
            write_model(directory, trained, described, self._task, self._source("train").first_row)

    def _counts(self) -> Mapping[str, float]:
        return self._worker.counts()

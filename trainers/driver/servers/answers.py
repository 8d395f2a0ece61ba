"""The answers of workers under parameter servers, as events for the controller. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES
from orchestray.platform.actors.member import Failure
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.driver.control import events
from orchestray.trainers.ps.protocol.address import SERVER_LOST

if TYPE_CHECKING:
    from orchestray.trainers.driver.control.controller import State
    from orchestray.trainers.driver.runlog.losses import Losses
    from orchestray.trainers.driver.runlog.run_log import RunLog
    from orchestray.trainers.driver.servers.worker_group import WorkerGroup

_END_TIMEOUT_S = 0.5
"""Seconds until the end of a server's process is known, after its connections have ended."""


class Answers:
    """A reader of the workers' answers.

    Attributes:
        failures: failure of each worker whose own code raised an error, by rank.
    """

    def __init__(self, workers: WorkerGroup, losses: Losses, run_log: RunLog) -> None:
        """
        Args:
            workers: workers of the run, which know its servers.
            losses: record of lost processes.
            run_log: log of the run.
        """
        self.failures: dict[int, Failure] = {}
        self._workers, self._losses = workers, losses
        self._writer, self._run_progress = run_log.writer, run_log.run_progress

    def read(self, rank: int, reference: Any, state: State) -> events.Event:
        """Return the event that a worker's answer, or its loss, is to the controller.

        Args:
            rank: rank of the worker.
            reference: Ray reference of the answer, which is ready.
            state: present state of the controller.

        Raises:
            TrainingError: the worker could not run, or does not reach the servers.
        """
        gang = self._workers.gang
        try:
            answer = ray.get(reference)
        except LOSSES as error:
            self._losses.begin()
            return events.Lost(rank, gang.cause(rank, error))
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error
        if isinstance(answer, Failure):
            self._writer.event("worker_failed", role=gang.shape.role, rank=rank, traceback=answer.traceback)
            self.failures[rank] = answer
            return events.Failed(rank)
        if answer == SERVER_LOST and not self._is_expected_to_stop(rank, state):
            # Its connection ends before the process's end is known.
            ended, _ = ray.wait(list(self._workers.primaries.ends.values()), num_returns=1, timeout=_END_TIMEOUT_S)
            self._workers.lost_touch(rank, self._run_progress.last_step, is_explained=bool(ended))
        if answer in (PEER_LOST, SERVER_LOST):
            return events.StoppedEarly(rank, explained=answer == SERVER_LOST)
        return events.Done(rank)

    def _is_expected_to_stop(self, rank: int, state: State) -> bool:
        unit = state.units.get(rank // self._workers.size)
        return bool(state.servers_lost) or (unit is not None and unit.stops)

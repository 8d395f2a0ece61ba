"""The beginnings of a run under parameter servers: each has the servers serve from the newest checkpoint there is.

It imports no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.trainers.config.settings import Start

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.actors_file import ActorsFile
    from orchestray.trainers.driver.runlog.run_log import RunLog
    from orchestray.trainers.driver.servers.leaf_group import Leaves
    from orchestray.trainers.driver.servers.resizing import Resizing
    from orchestray.trainers.driver.servers.worker_group import WorkerGroup


class Beginnings:
    """The attempts of a run, each from the newest checkpoint of the run, or from the one that it resumes."""

    def __init__(
        self,
        settings: ReplicaSettings,
        run_log: RunLog,
        checkpoint: Any,
        *,
        actors_file: ActorsFile,
        workers: WorkerGroup,
        leaves: Leaves | None,
        resizing: Resizing,
    ) -> None:
        """
        Args:
            settings: settings of every process.
            run_log: log of the run.
            checkpoint: checkpoint to continue from at first, or None.
            actors_file: file of the run's processes.
            workers: workers of the run, which know its servers.
            leaves: leaf servers of the run, or None.
            resizing: number of workers that a lead is to know of.
        """
        self._settings, self._run_log, self._checkpoint = settings, run_log, checkpoint
        self._actors_file, self._workers, self._primaries = actors_file, workers, workers.primaries
        self._leaves, self._resizing = leaves, resizing
        self._announced = False
        self._num_beginnings = 0
        self._bytes_reported_before = 0
        """Bytes in the lines of earlier attempts, which a checkpoint includes."""

    @property
    def bytes_reported(self) -> int:
        """Bytes in the lines of the present attempt."""
        return self._run_log.bytes_reported - self._bytes_reported_before

    def begin(self) -> None:
        """Have the servers serve from the newest checkpoint there is.

        Raises:
            MemberLostError: a server died.
            ConnectionError, TimeoutError: a leaf server does not reach one.
        """
        if self._num_beginnings == 0 and self._settings.model_directory:
            # Logs of an earlier session: it may have had other settings, and the metric lines end at the checkpoint.
            shutil.rmtree(Path(self._settings.model_directory).parent / "servers", ignore_errors=True)
        self._bytes_reported_before = self._run_log.bytes_reported
        progress = self._run_log.run_progress
        start = Start(progress.started_at, self._checkpoint, self._num_beginnings)
        self._num_beginnings += 1
        self._primaries.begin(start, self._workers.plan)
        if not self._announced:
            self._announce()
        self._resizing.tell_lead()
        if self._leaves is not None:
            self._leaves.begin(start, progress.total_steps, self._primaries.expect)

    def _announce(self) -> None:
        servers = self._primaries.gang
        sizes = servers.gather([self._primaries.ask_lead("describe")])[0]
        self._actors_file.write()
        self._run_log.announce(
            sizes,
            self._settings.batch_size,
            resumed=self._checkpoint is not None,
            workers=len(self._workers.gang.slots),
            parameter_servers=len(servers.slots),
        )
        self._announced = True
        self._actors_file.announce()

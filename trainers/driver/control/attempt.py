"""An attempt at a run, as the engines are given it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.actors.slot import Patience

if TYPE_CHECKING:
    import threading

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run, made by one command, or by one process of a trial."""

    settings: ReplicaSettings
    """Settings of every process."""
    cluster: Cluster
    """Cluster to run on."""
    run_log: RunLog
    """Log of the run; its progress includes that from before a resumption."""
    checkpoint: Any
    """Checkpoint to continue from at first (`platform.run.checkpoint.Found`); None: there is none."""
    stop: threading.Event
    """Set when the run is to end with a checkpoint."""

    max_restarts: int = 0
    """Number of recoveries after which the run is given up."""
    patience: Patience = field(default_factory=Patience)
    """Patience with processes that do not answer, or make no progress."""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        settings: ReplicaSettings,
        cluster: Cluster,
        run_log: RunLog,
        checkpoint: Any,
        stop: threading.Event,
    ) -> Self:
        """Return an attempt with the patience of a config."""
        patience = Patience(config.hang_timeout_s, config.stall_timeout_s, config.report_hang_s)
        return cls(settings, cluster, run_log, checkpoint, stop, config.max_restarts, patience)

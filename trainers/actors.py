"""`engine: actors`: the replicas are the members of a gang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.placement import Shape
from orchestray.trainers.driver import Driver

if TYPE_CHECKING:
    import threading

    from orchestray.platform.cluster import Cluster
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.trainers.settings import ReplicaSettings
    from orchestray.trainers.story import Book


def run_in_actors(
    config: TrainConfig,
    settings: ReplicaSettings,
    cluster: Cluster,
    book: Book,
    checkpoint: Any,
    stop: threading.Event,
) -> Any:
    """Form the gang, train; returns the replicas' `Outcome`."""
    shape = Shape(
        role="worker",
        size=settings.layout.size,
        cpus_per_member=config.resources.cpus_per_worker,
        gpus_per_member=config.resources.gpus_per_worker,
        spares=config.resources.spares,
        neighbours=settings.layout.tensor,
    )
    driver = Driver(
        settings,
        shape,
        cluster,
        book,
        checkpoint=checkpoint,
        max_restarts=config.max_restarts,
        stop=stop,
    )
    return driver.run()

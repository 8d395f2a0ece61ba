"""The engine `actors`: the replicas are the members of a gang."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.placement import Shape, node_for_all
from orchestray.platform.actors.slot import Patience
from orchestray.trainers.driver.engines.driver import Driver

if TYPE_CHECKING:
    import threading

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog


def run_in_actors(
    config: TrainConfig,
    settings: ReplicaSettings,
    cluster: Cluster,
    run_log: RunLog,
    checkpoint: Any,
    stop: threading.Event,
) -> Any:
    """Form the gang and train; return the replicas' `Outcome`.

    Args:
        config: config of the run.
        settings: settings of the replicas.
        cluster: cluster to run on.
        run_log: log of the run.
        checkpoint: checkpoint to continue from, or None.
        stop: set when the run is to end with a checkpoint.
    """
    if settings.exchange.get("type") == "parameter_server":
        return _run_with_servers(config, settings, cluster, run_log, checkpoint, stop)
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
        run_log,
        checkpoint=checkpoint,
        max_restarts=config.max_restarts,
        patience=Patience(config.hang_timeout_s, config.stall_timeout_s, config.report_hang_s),
        stop=stop,
    )
    return driver.run()


def _run_with_servers(
    config: TrainConfig,
    settings: ReplicaSettings,
    cluster: Cluster,
    run_log: RunLog,
    checkpoint: Any,
    stop: threading.Event,
) -> Any:
    from orchestray.trainers.driver.servers.driver import CentralDriver

    resources, exchange = config.resources, settings.exchange
    servers = Shape(
        role="parameter_server",
        size=exchange["shards"] * exchange["replicas"],
        cpus_per_member=0.0,  # they wait most of the time, while the workers compute
        apart=exchange["shards"] if exchange["replicas"] > 1 else 0,  # the loss of a node must not take all copies
    )
    workers = Shape(
        role="worker",
        size=settings.layout.size,
        cpus_per_member=resources.cpus_per_worker,
        gpus_per_member=resources.gpus_per_worker,
        spares=resources.spares,
    )
    if exchange["transport"] == "shared_memory":
        node = node_for_all(cluster, workers)
        servers, workers = replace(servers, node=node), replace(workers, node=node)
    shapes = [servers, workers]
    if exchange["groups"] > 1:
        shapes.append(Shape(role="leaf_server", size=exchange["groups"], cpus_per_member=0.0, beside=workers.role))
    driver = CentralDriver(
        settings,
        shapes,
        cluster,
        run_log,
        checkpoint=checkpoint,
        max_restarts=config.max_restarts,
        patience=Patience(config.hang_timeout_s, config.stall_timeout_s, config.report_hang_s),
        stop=stop,
    )
    return driver.run()

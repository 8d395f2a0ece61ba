"""The engine `actors`: the replicas are the members of a gang."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.placement import Shape, node_for_all
from orchestray.trainers.driver.engines.driver import Driver

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.driver.control.attempt import Attempt


def run_in_actors(config: TrainConfig, attempt: Attempt) -> Any:
    """Form the gang and train; return the replicas' `Outcome`."""
    settings, resources = attempt.settings, config.resources
    workers = Shape(
        role="worker",
        size=settings.layout.size,
        cpus_per_member=resources.cpus_per_worker,
        gpus_per_member=resources.gpus_per_worker,
        spares=resources.spares,
        neighbours=settings.layout.tensor,
    )
    if settings.exchange.get("type") == "parameter_server":
        # Its stages send each other activations in every share; replicas never send each other anything.
        return _run_with_servers(attempt, replace(workers, neighbours=settings.layout.model_size))
    return Driver(attempt, workers).run()


def _run_with_servers(attempt: Attempt, workers: Shape) -> Any:
    from orchestray.trainers.driver.servers.driver import CentralDriver

    exchange = attempt.settings.exchange
    servers = Shape(
        role="parameter_server",
        size=exchange["shards"] * exchange["replicas"],
        cpus_per_member=0.0,  # they wait most of the time, while the workers compute
        apart=exchange["shards"] if exchange["replicas"] > 1 else 0,  # the loss of a node must not take all copies
    )
    if exchange["transport"] == "shared_memory":
        node = node_for_all(attempt.cluster, workers)
        servers, workers = replace(servers, node=node), replace(workers, node=node)
    shapes = [servers, workers]
    if exchange["groups"] > 1 or exchange["compute_groups"]:
        shapes.append(Shape(role="leaf_server", size=exchange["groups"], cpus_per_member=0.0, beside=workers.role))
    return CentralDriver(attempt, shapes).run()

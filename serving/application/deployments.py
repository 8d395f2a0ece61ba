"""The deployments of an application: which versions have one, its name, and its options."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from orchestray.serving.application.model_replica import ModelReplica
from orchestray.serving.application.serve_apps import BUILDING
from orchestray.serving.application.starting import divided_network
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.models.content import content_of
from orchestray.serving.replicas.autoscaler import ScalingPolicy
from orchestray.serving.replicas.batchers import load_arguments
from orchestray.serving.replicas.scaling import IDLE_BEFORE_ZERO_S

if TYPE_CHECKING:
    from ray.serve import Application

HEALTH_PERIOD_S = 1.0
"""Seconds between two checks of a replica by Serve."""
_DOWN_AFTER_S = 10.0
"""Seconds for which there must be too many replicas before Serve's control loop removes any."""


def has_replicas(model: ModelSection, config: ServeConfig) -> bool:
    """Return True if a version runs in processes of its own, as a deployment; False: in the ingress, or in a gang."""
    return not config.in_process and divided_network(model, config) is None


def model_key(model: ModelSection) -> str:
    """Return the key of a version in the ingress' list of deployments."""
    return f"{model.name}/{model.version}"


def deployment_name(model: ModelSection, config: ServeConfig) -> str:
    """Return the name of a version's deployment: another for other settings, or a run that was trained again."""
    identity = json.dumps([config.model_settings(model), content_of(model.run)], sort_keys=True)
    return f"{model.name}-{model.version}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def model_deployment(model: ModelSection, config: ServeConfig, name: str, *, reserves_cpus: bool) -> Application:
    """Return the deployment of a version, bound to its model.

    Args:
        model: the model's section of the config.
        config: config of the endpoint.
        name: name of the deployment.
        reserves_cpus: True to have Ray reserve CPUs for it; False: they may be over-subscribed.
    """
    from ray import serve

    load = {**load_arguments(model, config), "content": content_of(model.run)}
    resources = config.resources
    with BUILDING:
        deployment: Any = serve.deployment(ModelReplica)
        return deployment.options(  # type: ignore[no-any-return]
            name=name,
            ray_actor_options={
                "num_cpus": resources.cpus_per_worker if reserves_cpus else 0,
                "num_gpus": resources.gpus_per_worker,
            },
            health_check_period_s=HEALTH_PERIOD_S,
            graceful_shutdown_wait_loop_s=0.1,
            **_number(config, name),
        ).bind(load, config.batching.run_timeout_s)


def _number(config: ServeConfig, name: str) -> dict[str, Any]:
    """Return the number of replicas, or the scaling, as options of a deployment."""
    replicas = config.replicas
    if not isinstance(replicas, Scaling):
        return {"num_replicas": replicas}
    policy = {
        "key": name,
        "least": replicas.min,
        "most": replicas.max,
        "target_latency_s": replicas.target_latency_ms / 1e3,
        "idle_before_zero_s": IDLE_BEFORE_ZERO_S,
    }
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "initial_replicas": max(1, replicas.min),  # at least one: it says the model's signature
            "upscale_delay_s": 0.0,
            "downscale_delay_s": _DOWN_AFTER_S,
            "downscale_to_zero_delay_s": 0.0,  # the policy has waited
            "policy": {
                "policy_function": f"{ScalingPolicy.__module__}:{ScalingPolicy.__name__}",
                "policy_kwargs": policy,
            },
        }
    }

"""The application of an endpoint: an ingress, and a deployment of each model version that has replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.application.deployments import (
    HEALTH_PERIOD_S,
    deployment_name,
    has_replicas,
    model_deployment,
    model_key,
)
from orchestray.serving.application.endpoint import settings_of
from orchestray.serving.application.ingress import Ingress, Wanted
from orchestray.serving.application.starting import gpus_of_listener
from orchestray.serving.config.load import ServeSource, load_serve_config
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.http.settings import JSON, HttpSettings

if TYPE_CHECKING:
    from ray.serve import Application

INGRESS = "ingress"
"""Name of the deployment that takes requests."""
_MANY = 100_000
"""Requests at a time as Ray Serve counts them: the real limit is that of the endpoint's own queues."""
_DRAIN_S = 30.0
_SOURCES = ("run", "config")


def app(config: ServeSource) -> Application:
    """Return an endpoint as an application of Ray Serve, for `serve run`, `serve deploy` and `serve.run`.

    Its ingress answers at `http.host:http.port` of its own node (default: any port that is free), and by the same
    routes behind Serve's proxy. The method `predict` of the application's handle answers through the same batches.

    Args:
        config: a run directory, a YAML file, a config; or the arguments of `serve run` and `serve deploy`: `run` (a run
            directory) or `config` (a file), and any other key of a config, dotted or nested.

    Raises:
        ConfigError: the config is wrong; every problem is listed.
    """
    is_arguments = isinstance(config, Mapping) and "models" not in config
    loaded = _from_arguments(config) if is_arguments else load_serve_config(config)  # type: ignore[arg-type]
    if "port" not in loaded.http.model_fields_set:  # the usual one is that of Serve's proxy
        loaded = loaded.model_copy(update={"http": loaded.http.model_copy(update={"port": 0})})
    return application(loaded)


def application(
    config: ServeConfig, *, reserves_cpus: bool = True, composed: bool = True, here: bool = False
) -> Application:
    """Return the application of a checked config.

    Args:
        config: config of the endpoint.
        reserves_cpus: True to have Ray reserve CPUs for its models; False: they may be over-subscribed.
        composed: True if versions with replicas are deployments of this application; False: applications of their own,
            which the ingress starts, and ends when a change leaves them out.
        here: True to have the ingress on the node of this process, to which its address then belongs.
    """
    import ray
    from ray import serve

    replicated = [model for model in config.models if composed and has_replicas(model, config)]
    names = {model_key(model): deployment_name(model, config) for model in replicated}
    models = [
        model_deployment(model, config, names[model_key(model)], reserves_cpus=reserves_cpus) for model in replicated
    ]
    num_inside = len(config.models) if config.in_process else 0
    resources = config.resources
    ingress: Any = serve.deployment(serve.ingress()(Ingress))
    return ingress.options(  # type: ignore[no-any-return]
        name=INGRESS,
        user_config=wanted_of(config, settings_of(config), names, reserves_cpus=reserves_cpus),
        max_ongoing_requests=_MANY,
        ray_actor_options={
            "num_cpus": resources.cpus_per_worker * num_inside if reserves_cpus else 0,
            "num_gpus": gpus_of_listener(config),
            "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if here else {},
        },
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_DRAIN_S,
    ).bind(*models)


def wanted_of(
    config: ServeConfig, settings: HttpSettings, deployments: Mapping[str, str], *, reserves_cpus: bool
) -> Wanted:
    """Return what an ingress is to serve, as JSON values: the `user_config` of its deployment.

    Args:
        config: config of the endpoint.
        settings: settings of the HTTP side.
        deployments: maps the key of a version to its deployment in the ingress's application, where it has one.
        reserves_cpus: True to have Ray reserve CPUs for replicas.
    """
    return {
        "config": config.model_dump(mode="json", exclude_unset=True),
        "settings": JSON.dump_python(settings, mode="json"),
        "deployments": dict(deployments),
        "reserves_cpus": reserves_cpus,
    }


def _from_arguments(arguments: Mapping[str, Any]) -> ServeConfig:
    """Return the config that the arguments of `serve run` or `serve deploy` name."""
    given = [key for key in _SOURCES if key in arguments]
    if len(given) != 1:
        raise ConfigError(
            f"the application takes one of run=RUN_DIR and config=FILE, and keys of a config; got "
            f"{', '.join(arguments) or 'nothing'}"
        )
    rest = {key: value for key, value in arguments.items() if key not in _SOURCES}
    return load_serve_config(str(arguments[given[0]]), list(_overrides(rest)))


def _overrides(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield `key.path=value` for each value of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value if isinstance(value, str) else json.dumps(value)}"

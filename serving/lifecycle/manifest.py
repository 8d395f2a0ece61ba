"""Kubernetes objects for an endpoint on KubeRay. Writing them needs no cluster.

A RayService is a Ray cluster and its applications of Ray Serve. The operator starts the pods, replaces those that die,
and makes the Service that sends requests to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestray.platform.config import yaml_text
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.jobs import kuberay
from orchestray.serving.application.starting import divided_network, gpus_of_listener
from orchestray.serving.config.load import dump_serve_yaml
from orchestray.serving.config.own_class import names_class
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.models.content import served_directory
from orchestray.trainers.saved.run import load_run

_APP = f"{__name__.removesuffix('.lifecycle.manifest')}:app"
"""The place of the application's builder, in the package of all of serving."""
_PORT = 8000
"""Port of Serve's proxy in each pod, to which KubeRay's Service sends requests."""
_OWN_PORT = 8001
"""Port of the ingress in its pod, which the proxy asks."""
_END_S = 45
"""Seconds from SIGTERM to the end of a pod, of which running requests have 30."""
_END_TLS = "leave it out, and have an Ingress or a service mesh end TLS before the pods"


def manifest_yaml(config: ServeConfig, *, image: str = "orchestray:latest") -> str:
    """Return the manifest as YAML documents, for `kubectl apply -f -`."""
    return "---\n".join(yaml_text.write(each) for each in manifest(config, image=image))


def manifest(config: ServeConfig, *, image: str = "orchestray:latest") -> list[dict[str, Any]]:
    """Return a ConfigMap with the config, and a RayService.

    The runs are expected in a PersistentVolumeClaim `<name>-runs`; an optional token in the key `token` of a Secret
    `<name>-token`.

    Args:
        config: config of the endpoint.
        image: image of a container with orchestray installed.

    Raises:
        ConfigError: all problems that would keep a pod from starting, or from serving the right runs; or the number of
            pods depends on a run that is not here.
    """
    _check(config)
    name = kuberay.name_for(config.name)
    inside = dump_serve_yaml(_in_a_pod(config))
    return [
        kuberay.labelled("v1", "ConfigMap", f"{name}-config", name, data={"serve.yaml": inside}),
        kuberay.labelled("ray.io/v1", "RayService", name, name, spec=_service(config, name, image)),
    ]


def assumptions(config: ServeConfig) -> list[str]:
    """Return sentences on what the manifest takes for granted because a run is not on this machine."""
    if config.compute.network is not None:
        return []
    return [
        f"models.{index}.run: {problem}. The manifest takes it for a model in one process, as it may not have been "
        "trained: give compute.network=<tensor and pipeline>, or make the manifest where the run is"
        for index, model in enumerate(config.models)
        if (problem := _problem_of_run(model)) is not None
    ]


def _problem_of_run(model: ModelSection) -> str | None:
    """Return the reason why a model's run cannot be read here; None if it can, or is a class in a file."""
    if names_class(model.run):
        return None
    try:
        load_run(served_directory(model.run))
    except OrchestrayError as error:
        return str(error).rstrip(".")
    return None


def _check(config: ServeConfig) -> None:
    """Refuse files of this machine, which a pod does not have, and settings that do not suit a pod."""
    files = {
        "http.tls.certificate": (config.http.tls.certificate, _END_TLS),
        "http.tls.key": (config.http.tls.key, _END_TLS),
        "auth.tokens_file": (config.auth.tokens_file, "leave it out, and put a token into the Secret of the manifest"),
    }
    problems = [
        f"{key}: is a file of this machine, which a pod does not have: {instead}"
        for key, (file, instead) in files.items()
        if file is not None
    ]
    mounted: dict[str, tuple[int, str]] = {}
    for index, model in enumerate(config.models):
        first, run = mounted.setdefault(_mounted(model), (index, model.run))
        if run != model.run:
            problems.append(
                f"models.{index}.run: {model.run} and that of models.{first}, {run}, would both be {_mounted(model)} "
                "in the volume of the pods: give one of the directories another name"
            )
    if config.compute.network is not None and config.compute.network.memory_gb is not None:
        problems += [
            f"models.{index}.run: {problem}; compute.network.memory_gb asks for its sizes: give "
            "compute.network.pipeline in its place, or make the manifest where the run is"
            for index, model in enumerate(config.models)
            if (problem := _problem_of_run(model)) is not None
        ]
    if problems:
        raise ConfigError(problems)


def _in_a_pod(config: ServeConfig) -> ServeConfig:
    """Return the config for a pod: runs in the pods' volume, and an ingress that only its pod's proxy asks."""
    models = tuple(model.model_copy(update={"run": _mounted(model)}) for model in config.models)
    http = config.http.model_copy(update={"host": "127.0.0.1", "port": _OWN_PORT})
    return config.model_copy(update={"models": models, "http": http})


def _mounted(model: ModelSection) -> str:
    run = Path(model.run)
    return f"{kuberay.RUNS}/{run.parent.name}/best" if run.name == "best" else f"{kuberay.RUNS}/{run.name}"


def _service(config: ServeConfig, name: str, image: str) -> dict[str, Any]:
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": _APP,
        "args": {"config": f"{kuberay.CONFIG}/serve.yaml"},
    }
    served = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": _PORT},  # noqa: S104 - the pod's own network
        "applications": [application],
    }
    pods = _pods_of(config)
    head = {
        "rayStartParams": kuberay.head_params(),
        "template": _pod(name, image, "ray-head", {"cpu": "1", "memory": "4Gi"}, kuberay.HEAD_PORTS),
    }
    cpus, gpus = (
        pods.processes * each for each in (config.resources.cpus_per_worker, config.resources.gpus_per_worker)
    )
    workers = {
        "groupName": "replicas",
        "replicas": max(1, pods.least),
        "minReplicas": pods.least,
        "maxReplicas": pods.most,
        "rayStartParams": {"num-cpus": str(math.ceil(cpus))},
        "template": _pod(name, image, "ray-worker", kuberay.resources_for(cpus, gpus), {}),
    }
    cluster = kuberay.cluster(head, workers)
    if isinstance(config.replicas, Scaling):
        cluster["enableInTreeAutoscaling"] = True
    return {"serveConfigV2": yaml_text.write(served), "rayClusterConfig": cluster}


class _Pods(NamedTuple):
    """Number of worker pods, and what each of them has room for."""

    least: int
    most: int
    processes: int
    """Processes with the resources of a replica that a pod has room for."""


def _pods_of(config: ServeConfig) -> _Pods:
    """Return the worker pods for the replicas of every version, shadows included.

    A stage of a divided model has a pod of its own, with all processes that split its layers: they are neighbours. With
    `replicas: 1` one pod has the ingress, which computes for all other versions. An ingress that generates text on a
    GPU beside replicas has a pod, too.
    """
    replicas = config.replicas
    few, many = (replicas.min, replicas.max) if isinstance(replicas, Scaling) else (replicas, replicas)
    divided = [network for model in config.models if (network := divided_network(model, config)) is not None]
    of_stages = many * sum(network.pipeline for network in divided)
    widest = max((network.tensor for network in divided), default=1)
    if config.in_process:
        return _Pods(1 + of_stages, 1 + of_stages, max(widest, len(config.models)))
    plain = len(config.models) - len(divided)
    more = of_stages + (gpus_of_listener(config) > 0)
    return _Pods(few * plain + more, many * plain + more, widest)


def _pod(
    name: str, image: str, container_name: str, resources: Mapping[str, str], ports: Mapping[str, int]
) -> dict[str, Any]:
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token", "optional": True}}
    return kuberay.pod(
        name,
        image,
        container_name,
        resources,
        {**ports, "serve": _PORT},
        end_s=_END_S,
        env=[{"name": "ORCHESTRAY_TOKEN", "valueFrom": token}],
    )

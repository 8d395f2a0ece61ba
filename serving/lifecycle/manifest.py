"""Kubernetes objects for an endpoint that scales by pods. Writing them needs no cluster.

Each pod is a whole endpoint with its model in the front's process. Kubernetes decides the number of pods, restarts
them, and spreads the requests. (With Ray on Kubernetes, `orchestray serve --address` works as on any Ray cluster.)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.errors import ConfigError
from orchestray.serving.config.load import dump_serve_yaml
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig

_RUNS = "/runs"
_CONFIG = "/etc/orchestray"
_PORT = 8000
_PRE_STOP_S = 5
"""Seconds that a terminating pod still answers.

Kubernetes signals a pod at the moment when it begins to remove it from the Service, and the process closes its socket
at once. Connections that are still sent to the pod would be refused.
"""
_END_S = 45
"""Seconds from SIGTERM to the end, of which running requests have 30."""
_END_TLS = "leave it out, and have an Ingress or a service mesh end TLS before the pods"


def manifest_yaml(config: ServeConfig, *, image: str = "orchestray:latest") -> str:
    """Return the manifest as YAML documents, for `kubectl apply -f -`."""
    return "---\n".join(yaml_text.write(each) for each in manifest(config, image=image))


def manifest(config: ServeConfig, *, image: str = "orchestray:latest") -> list[dict[str, Any]]:
    """Return a ConfigMap with the config, a Deployment, a Service, and with autoscaling a HorizontalPodAutoscaler.

    The runs are expected in a PersistentVolumeClaim `<name>-runs`; an optional token in the key `token` of a Secret
    `<name>-token`.

    Args:
        config: config of the endpoint.
        image: image of a container with orchestray installed.

    Raises:
        ConfigError: all problems that would keep a pod from starting, or from serving the right runs.
    """
    _check(config)
    name = config.name.lower().replace("_", "-").replace(".", "-").strip("-")
    objects = [
        _object("v1", "ConfigMap", f"{name}-config", name, data={"serve.yaml": dump_serve_yaml(_in_a_pod(config))}),
        _object("apps/v1", "Deployment", name, name, spec=_deployment(config, name, image)),
        _object(
            "v1",
            "Service",
            name,
            name,
            spec={"selector": {"app": name}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        ),
    ]
    if isinstance(config.replicas, Scaling):
        objects.append(_object("autoscaling/v2", "HorizontalPodAutoscaler", name, name, spec=_autoscaler(config, name)))
    return objects


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
    if problems:
        raise ConfigError(problems)


def _object(version: str, kind: str, name: str, app: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": {"app": app}}, **more}


def _in_a_pod(config: ServeConfig) -> ServeConfig:
    """Return the config for a pod: runs in the pods' volume, all addresses, one process."""
    models = tuple(model.model_copy(update={"run": _mounted(model)}) for model in config.models)
    http = config.http.model_copy(update={"host": "0.0.0.0", "port": _PORT})  # noqa: S104 - the pod's own network
    return config.model_copy(update={"models": models, "http": http, "replicas": 1})


def _mounted(model: ModelSection) -> str:
    run = Path(model.run)
    return f"{_RUNS}/{run.parent.name}/best" if run.name == "best" else f"{_RUNS}/{run.name}"


def _deployment(config: ServeConfig, name: str, image: str) -> dict[str, Any]:
    replicas = config.replicas
    spec: dict[str, Any] = {
        "selector": {"matchLabels": {"app": name}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": _pod(config, name, image)},
    }
    if not isinstance(replicas, Scaling):  # else the autoscaler's, which a second `kubectl apply` must not undo
        spec["replicas"] = replicas
    return spec


def _pod(config: ServeConfig, name: str, image: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": f"{config.resources.cpus_per_worker:g}"}
    if config.resources.gpus_per_worker:
        resources["nvidia.com/gpu"] = str(math.ceil(config.resources.gpus_per_worker))
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token", "optional": True}}
    container = {
        "name": "endpoint",
        "image": image,
        "command": ["orchestray", "serve", f"{_CONFIG}/serve.yaml", "--runs-dir", "/tmp"],  # noqa: S108 - in the pod
        "env": [{"name": "ORCHESTRAY_TOKEN", "valueFrom": token}],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": "http"}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/v2/health/live", "port": "http"}, "periodSeconds": 10},
        "startupProbe": {
            "httpGet": {"path": "/v2/health/live", "port": "http"},
            "periodSeconds": 2,
            "failureThreshold": 150,
        },
        # As a command: clusters before Kubernetes 1.30 refuse the action `sleep`, as a hook without a handler.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_S)]}}},
        "resources": {"requests": resources, "limits": dict(resources)},  # no YAML anchor
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG, "readOnly": True},
            {"name": "runs", "mountPath": _RUNS, "readOnly": True},
        ],
    }
    return {
        "terminationGracePeriodSeconds": _PRE_STOP_S + _END_S,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{name}-config"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs", "readOnly": True}},
        ],
    }


def _autoscaler(config: ServeConfig, name: str) -> dict[str, Any]:
    """Return the spec of scaling by CPU use: Kubernetes itself does not know latency, and keeps at least one pod."""
    assert isinstance(config.replicas, Scaling)
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": max(1, config.replicas.min),
        "maxReplicas": config.replicas.max,
        "metrics": [
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
            }
        ],
    }

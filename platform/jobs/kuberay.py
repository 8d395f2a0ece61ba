"""Parts of Kubernetes objects for KubeRay, shared by those of endpoints and of jobs. Writing them needs no cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

CONFIG = "/etc/orchestray"
"""Directory of the config in a pod, from a ConfigMap `<name>-config`."""
RUNS = "/runs"
"""Directory of the runs in a pod, from a PersistentVolumeClaim `<name>-runs`."""
HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
"""Ports of a head, as KubeRay's Services name them."""
_EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - the pod's own network


def name_for(text: str) -> str:
    """Return a name that Kubernetes takes, for one that a run or an endpoint has."""
    return text.lower().replace("_", "-").replace(".", "-").strip("-")


def labelled(version: str, kind: str, name: str, app: str, **more: Any) -> dict[str, Any]:
    """Return an object with its name, and the label of the whole that it is a part of."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": {"app": app}}, **more}


def resources_for(cpus: float, gpus: float) -> dict[str, str]:
    """Return the resources of a container; Kubernetes hands out whole GPUs."""
    return {"cpu": f"{cpus:g}", **({"nvidia.com/gpu": str(math.ceil(gpus))} if gpus else {})}


def head_params() -> dict[str, str]:
    """Return the arguments of `ray start` for a head. With CPUs of its own it would get replicas and workers, too."""
    return {"dashboard-host": _EVERY_ADDRESS, "num-cpus": "0"}


def cluster(head: Mapping[str, Any], workers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a Ray cluster with one kind of worker pods."""
    return {"rayVersion": metadata.version("ray"), "headGroupSpec": head, "workerGroupSpecs": [workers]}


def pod(
    name: str,
    image: str,
    container_name: str,
    resources: Mapping[str, str],
    ports: Mapping[str, int],
    *,
    end_s: int,
    writes_runs: bool = False,
    files: Sequence[Mapping[str, str]] = (),
    env: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the template of a pod that has the config and the runs.

    Args:
        name: name of the endpoint or job.
        image: image of a container with orchestray installed.
        container_name: name of the container.
        resources: resources that it asks for, and gets no more of.
        ports: ports by name.
        end_s: seconds from SIGTERM to the end of the pod.
        writes_runs: True if it writes to the volume of runs.
        files: keys of the ConfigMap and the paths of their files; empty: each key is a file.
        env: variables of the container.
    """
    config = {"name": f"{name}-config", **({"items": [dict(each) for each in files]} if files else {})}
    access = {} if writes_runs else {"readOnly": True}
    container = {
        "name": container_name,
        "image": image,
        **({"env": [dict(each) for each in env]} if env else {}),
        **({"ports": [{"name": port, "containerPort": number} for port, number in ports.items()]} if ports else {}),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "runs", "mountPath": RUNS, **access},
        ],
    }
    spec = {
        "terminationGracePeriodSeconds": end_s,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": config},
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs", **access}},
        ],
    }
    return {"metadata": {"labels": {"app": name}}, "spec": spec}

"""Kubernetes objects for a command as a job on KubeRay. Writing them needs no cluster.

A RayJob is a Ray cluster that is there for one command: the operator starts the pods, runs the command on the head, and
takes the pods away at its end. The command's files travel in a ConfigMap.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.platform.jobs import kuberay

MAX_BYTES = 900_000
"""Largest total size of the files, in bytes; Kubernetes takes 1 MiB for an object."""
_MOST_OF_KEY = 200
"""Characters of a path that its key has; Kubernetes takes 253."""
_SCRIPT = "run.sh"
_FILES = "files"
_RETRIES = 3
"""Number of times that the operator starts a lost cluster again."""
_END_S = 120
"""Seconds from SIGTERM to the end of a pod, in which workers save a checkpoint."""


@dataclass(frozen=True)
class WorkerPods:
    """Number of worker pods, and what each of them has room for."""

    count: int
    processes: int
    """Workers that a pod has room for."""
    cpus: float
    """CPUs of each worker."""
    gpus: float
    """GPUs of each worker."""


def ray_job(
    name: str, words: Sequence[str], files: Mapping[str, Path], pods: WorkerPods, *, image: str
) -> list[dict[str, Any]]:
    """Return a ConfigMap with the files, and a RayJob.

    The runs go to a PersistentVolumeClaim `<name>-runs`, which all pods write to. A run that is there already is gone
    on with: so a retry of the operator loses no more than the steps since the last checkpoint.

    Args:
        name: name of the run.
        words: the command and its arguments, whose paths start at the root of the files.
        files: the command's files, by their paths from that root.
        pods: the pods of the workers.
        image: image of a container with orchestray installed.

    Raises:
        ConfigError: the files are too large for a ConfigMap.
    """
    app = kuberay.name_for(name)
    content, items = _content(files)
    text = {_SCRIPT: _script(name, words), **{key: each for key, each in content.items() if isinstance(each, str)}}
    binary = {key: base64.b64encode(each).decode() for key, each in content.items() if isinstance(each, bytes)}
    data = {"data": text, **({"binaryData": binary} if binary else {})}
    places = [{"key": _SCRIPT, "path": _SCRIPT}, *items]
    spec = {
        "entrypoint": f"sh {kuberay.CONFIG}/{_SCRIPT}",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": _RETRIES,
        "rayClusterSpec": _cluster(app, image, pods, places),
    }
    return [
        kuberay.labelled("v1", "ConfigMap", f"{app}-config", app, **data),
        kuberay.labelled("ray.io/v1", "RayJob", app, app, spec=spec),
    ]


def _script(name: str, words: Sequence[str]) -> str:
    """Return the script that runs the command. An entry point would pass through the shell of another pod first."""
    run = shlex.quote(f"{kuberay.RUNS}/{name}/config.yaml")
    command, *arguments = words
    resumes = "" if "--resume" in arguments else f"[ -e {run} ] && set -- --resume\n"
    whole = shlex.join(["orchestray", command, "--runs-dir", kuberay.RUNS])
    return f'cd {kuberay.CONFIG}/{_FILES}\n{resumes}exec {whole} "$@" {shlex.join(arguments)}\n'


def _content(files: Mapping[str, Path]) -> tuple[dict[str, str | bytes], list[dict[str, str]]]:
    """Return the contents of the files by keys that Kubernetes takes, and the path of each key."""
    content: dict[str, str | bytes] = {}
    items = []
    for index, (path, file) in enumerate(sorted(files.items())):
        key = re.sub(r"[^-._a-zA-Z0-9]+", "-", path)[-_MOST_OF_KEY:]
        while key in content or key == _SCRIPT:
            key = f"{index}-{key}"
        data = file.read_bytes()
        try:
            content[key] = data.decode()
        except UnicodeDecodeError:
            content[key] = data
        items.append({"key": key, "path": f"{_FILES}/{path}"})
    size = sum(file.stat().st_size for file in files.values())
    if size > MAX_BYTES:
        largest = max(files, key=lambda path: files[path].stat().st_size)
        raise ConfigError(
            f"The files to send have {size / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.1f} MB go into a ConfigMap (the "
            f"largest is {largest}). Put the data into the volume of the runs, or into an object store, and give that "
            f"place: an absolute path as {kuberay.RUNS}/data, or a URI such as s3://bucket/data."
        )
    return content, items


def _cluster(app: str, image: str, pods: WorkerPods, places: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    cpus, gpus = pods.processes * pods.cpus, pods.processes * pods.gpus

    def pod(container: str, resources: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, Any]:
        return kuberay.pod(app, image, container, resources, ports, end_s=_END_S, writes_runs=True, files=places)

    head = {
        "rayStartParams": kuberay.head_params(),
        "template": pod("ray-head", {"cpu": "1", "memory": "4Gi"}, kuberay.HEAD_PORTS),
    }
    workers = {
        "groupName": "workers",
        "replicas": pods.count,
        "minReplicas": pods.count,
        "maxReplicas": pods.count,
        "rayStartParams": {"num-cpus": str(math.ceil(cpus))},
        "template": pod("ray-worker", kuberay.resources_for(cpus, gpus), {}),
    }
    return kuberay.cluster(head, workers)

"""A command as Kubernetes objects: what a cluster gets, and what its pods do with it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from orchestray.cli.submit import _parse
from orchestray.platform.jobs.kuberay import CONFIG, RUNS
from support.cli import orchestray_here
from support.patience import PATIENCE_S

KUBERNETES = "1.31"
SUPPORT = Path(__file__).parents[2] / "support"
RUN = "task: {type: digits}\ntrain: {batch_size: 64, steps: 4, optimizer: {type: sgd, lr: 0.1}}\n"
SEARCH = """
base: conf/digits.yaml
search:
  method: {type: random}
  objective: {metric: accuracy}
  space:
    train.optimizer.lr: {type: uniform, low: 0.1, high: 0.5}
    strategy.network.data: {type: choice, values: [1, 3]}
  budget: {trials: 8, steps_per_trial: 4}
  parallel: 4
"""
MINE = """
name: My_run.1
task: {type: "../code/mine.py:Mine", path: ../some data/points.csv}
train: {batch_size: 8, steps: 4, optimizer: {type: sgd, lr: 0.1}}
"""
TASK = """
import helper


class Mine:
    def __init__(self, path):
        self.path = path

    def build_model(self):
        return helper.model()

    def dataset(self, split):
        return self.path

    def to_batch(self, columns):
        return columns

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {}
"""


def schema() -> dict[str, Any]:
    """Return the schema of a RayJob, with that of its cluster."""
    job, service = (
        json.loads((SUPPORT / f"ray_{name}_schema.json").read_text(encoding="utf-8")) for name in ("job", "service")
    )
    job["properties"]["spec"]["properties"]["rayClusterSpec"] = service["properties"]["spec"]["properties"][
        "rayClusterConfig"
    ]
    return dict(job)


def manifest(folder: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the RayJob of a command, checked by their schemas."""
    for name, text in {
        "conf/digits.yaml": RUN,
        "conf/rates.yaml": SEARCH.replace("conf/", ""),
        "conf/mine.yaml": MINE,
        "code/mine.py": TASK,
        "code/helper.py": "import torch\n\n\ndef model():\n    return torch.nn.Linear(1, 1)\n",
        "some data/points.csv": "x,y\n1,2\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    with contextlib.chdir(folder):
        done = orchestray_here("submit", "--manifest", "--image", "registry/image:1", *words)
    assert done.returncode == 0, done.stderr
    config, job = yaml.safe_load_all(done.stdout)
    kubernetes_validate.validate(config, KUBERNETES, strict=True)
    jsonschema.validate(job, schema())
    return config, job


def workers_of(job: dict[str, Any]) -> dict[str, Any]:
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return dict(workers)


def in_a_pod(config: dict[str, Any], job: dict[str, Any], place: Path) -> Path:
    """Write the files of a pod's volume to a folder; return it."""
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = (each["configMap"] for each in pod["volumes"] if "configMap" in each)
    assert volume["name"] == config["metadata"]["name"]
    binary = {key: base64.b64decode(text) for key, text in config.get("binaryData", {}).items()}
    content = {**{key: text.encode() for key, text in config["data"].items()}, **binary}
    assert sorted(item["key"] for item in volume["items"]) == sorted(content)
    for item in volume["items"]:
        (place / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (place / item["path"]).write_bytes(content[item["key"]])
    return place


def test_a_manifest_of_a_job_has_the_shape_of_its_schemas_and_pods_that_write_the_runs(tmp_path: Path) -> None:
    _, job = manifest(tmp_path, "train", "conf/digits.yaml", "resources.gpus_per_worker=1")
    spec = job["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], workers_of(job)):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "registry/image:1"
        (runs,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == RUNS)
        assert not runs.get("readOnly")
        (claim,) = (each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if each["name"] == runs["name"])
        assert claim == {"claimName": "digits-runs"}
    assert container["resources"]["limits"] == {"cpu": "1", "nvidia.com/gpu": "1"}
    assert job["spec"]["entrypoint"] == f"sh {CONFIG}/run.sh"
    job["spec"]["backoffLimit"] = "three"
    with pytest.raises(jsonschema.ValidationError, match="'three' is not of type 'integer'"):
        jsonschema.validate(job, schema())


@pytest.mark.parametrize(
    ("command", "pods", "cpus"),
    [
        (["train", "conf/digits.yaml", "strategy.network.data=3", "resources.spares=1"], 4, "2"),
        # Workers that split layers are neighbours, as those of a server's replica; who shares memory has one pod.
        (["train", "conf/digits.yaml", "strategy.network={data: 2, tensor: 3}"], 2, "6"),
        (["train", "conf/digits.yaml", "strategy.network={data: 2, pipeline: 2}"], 4, "2"),
        (
            [
                "train",
                "conf/digits.yaml",
                "strategy.network.data=4",
                "strategy.exchange={type: parameter_server, consistency: asynchronous, transport: shared_memory}",
            ],
            1,
            "8",
        ),
        # Of a search, a pod for each trial that runs beside the others, with room for the largest.
        (["search", "conf/rates.yaml"], 4, "6"),
    ],
)
def test_a_job_has_pods_for_all_its_workers(command: list[str], pods: int, cpus: str, tmp_path: Path) -> None:
    key = "base.resources.cpus_per_worker" if command[0] == "search" else "resources.cpus_per_worker"
    workers = workers_of(manifest(tmp_path, *command, f"{key}=2")[1])
    assert [workers[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [pods] * 3
    assert workers["rayStartParams"] == {"num-cpus": cpus}
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": cpus}


def test_a_pod_runs_the_command_on_its_files_and_goes_on_with_the_run_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    config, job = manifest(tmp_path / "here", "train", "--name", "other", "conf/mine.yaml", "train.steps=5")
    place = in_a_pod(config, job, tmp_path / "etc")
    for name in ("conf/mine.yaml", "code/mine.py", "code/helper.py", "some data/points.csv"):
        assert (place / "files" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    script = (place / "run.sh").read_text(encoding="utf-8")
    script = script.replace(CONFIG, str(place)).replace(RUNS, str(tmp_path / "runs"))
    (tmp_path / "orchestray").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    (tmp_path / "orchestray").chmod(0o755)

    def run() -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout.splitlines()

    directory, *words = run()
    assert directory == str(place / "files")
    parsed = _parse(words)
    assert parsed.runs_dir == str(tmp_path / "runs")
    assert parsed.words == ("train", "--name", "other", "conf/mine.yaml", "train.steps=5")
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "config.yaml").touch()
    assert sorted(run()) == sorted([directory, *words, "--resume"])


def test_a_file_that_is_no_text_arrives_as_it_is(tmp_path: Path) -> None:
    data = bytes(range(256))
    (tmp_path / "some data").mkdir()
    (tmp_path / "some data" / "more.bin").write_bytes(data)
    override = "task.path=some data/more.bin"
    place = in_a_pod(*manifest(tmp_path, "train", "conf/mine.yaml", override), tmp_path / "etc")
    assert (place / "files" / "some data" / "more.bin").read_bytes() == data


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs", "list"], "--manifest: takes the commands train and search, got runs"),
        (["--follow", "train", "conf/mine.yaml"], "--follow: goes with no --manifest: kubectl logs shows the log"),
        (
            ["train", "--runs-dir", "/data", "conf/mine.yaml"],
            "--runs-dir: goes with no --manifest: runs go to",
        ),
        (["train", "conf/large.yaml"], "at most 0.9 MB go into a ConfigMap (the largest is conf/large.csv)"),
    ],
)
def test_what_no_manifest_can_say_is_refused_with_the_reason(words: list[str], sentence: str, tmp_path: Path) -> None:
    manifest(tmp_path, "train", "conf/mine.yaml")
    (tmp_path / "conf" / "large.csv").write_text("1,2\n" * 250_000, encoding="utf-8")
    (tmp_path / "conf" / "large.yaml").write_text(
        MINE.replace("../some data/points.csv", "large.csv"), encoding="utf-8"
    )
    with contextlib.chdir(tmp_path):
        done = orchestray_here("submit", "--manifest", *words)
    assert done.returncode != 0
    assert sentence in " ".join(done.stderr.split())

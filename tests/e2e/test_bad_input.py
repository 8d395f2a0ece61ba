"""Messages to a user whose input is wrong, and the exit status."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestray.platform.cluster.cluster import Cluster
from support.cli import orchestray, orchestray_here

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
TASK = """
import pyarrow as pa
import torch
from torch import nn


class Mine:
    def build_model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return pa.table({"x": [1.0, 2.0], "y": [2.0, 4.0]})

    def to_batch(self, columns):
        x = torch.tensor(columns["x"].to_pylist())
        return {"inputs": torch.stack([x, x], dim=1), "y": torch.tensor(columns["y"].to_pylist())}

    def loss(self, outputs, batch):
        return ((outputs.squeeze(1) - batch["y"]) ** 2)LOSS

    def metrics(self, outputs, batch):
        return {}
"""

TRACKER = """
class Mine:
    def start(self, config, name, resumed):
        self.file = open("NOTES", "w")
        self.file.write(f"start {name} {resumed}\\n")

    def log(self, metrics, step):
        pass

    def finish(self, status):
        self.file.write(f"{status}\\n")
        self.file.close()
"""


def refused(
    tmp_path: Path, *arguments: str, status: int, config: str | Path = DIGITS, cluster: Cluster | None = None
) -> str:
    """Return stderr of a training that ends with `status`, without a traceback.

    It runs in this process, on `cluster`, or in one of its own, as all that a command does at its begin and end.
    """
    run = orchestray if cluster is None else orchestray_here
    done = run("train", config, *arguments, "--runs-dir", tmp_path / "runs", "--quiet")
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" not in done.stdout
    return done.stderr


def own_task(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.py").write_text(text)
    config = tmp_path / "mine.yaml"
    config.write_text(
        "name: mine\ntask: {type: 'mine.py:Mine'}\n"
        "train: {batch_size: 2, epochs: 1, optimizer: {type: sgd, lr: 0.01}}\n"
    )
    return str(config)


def parquet_config(tmp_path: Path, path: Path, **task: str) -> str:
    more = "".join(f", {key}: {value}" for key, value in task.items())
    config = tmp_path / "table.yaml"
    config.write_text(
        f"name: table\ntask: {{type: parquet, path: {path}, label: y{more}}}\n"
        "train: {batch_size: 8, epochs: 1, optimizer: {type: sgd, lr: 0.01}}\n"
    )
    return str(config)


def table(num_rows: int = 64, **columns: object) -> pa.Table:
    x = np.linspace(0.0, 1.0, num_rows)
    return pa.table({"x": x, "y": (x > 0.5).astype(np.int64), **columns})


def test_every_config_problem_is_listed_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, "train.batch_sise=3", "train.seed=abc", "train.accumulate=0", "task.type=digit", status=2)
    assert "train.batch_sise: " in said
    assert "did you mean 'batch_size'" in said
    assert "train.seed: " in said
    assert "train.accumulate: " in said
    assert "task.type: " in said
    assert not (tmp_path / "runs").exists()


def test_a_task_file_that_does_not_import_says_where_and_why(cluster: Cluster, tmp_path: Path) -> None:
    config = own_task(tmp_path, "import numpie\n" + TASK.replace("LOSS", ".mean()"))
    said = refused(tmp_path, config=config, status=2, cluster=cluster)
    assert "does not import" in said
    assert "mine.py, line 1" in said
    assert "No module named 'numpie'" in said


def test_a_task_file_that_lacks_a_method_names_it(cluster: Cluster, tmp_path: Path) -> None:
    config = own_task(tmp_path, TASK.replace("def metrics", "def metric").replace("LOSS", ".mean()"))
    said = refused(tmp_path, config=config, status=2, cluster=cluster)
    assert "lacks method 'metrics(outputs, batch)'" in said


def test_a_loss_that_is_not_a_scalar_is_named_with_its_shape(cluster: Cluster, tmp_path: Path) -> None:
    said = refused(tmp_path, config=own_task(tmp_path, TASK.replace("LOSS", "")), status=1, cluster=cluster)
    assert (
        "The task's loss must be a scalar tensor, the mean over the samples; loss() returned a tensor of shape" in said
    )


def test_a_task_prints_beside_its_module_and_gives_up_once_with_its_own_words(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("LAST = 'giving up'")
    task = TASK.replace("return nn", "print('building')\n        return nn").replace(")LOSS", ")")
    text = "import sys\nfrom .words import LAST\n" + task.replace("return ((", "sys.exit(LAST)\n        return ((")
    (tmp_path / "track.py").write_text(TRACKER.replace("NOTES", str(tmp_path / "notes.txt")))
    trackers = f"trackers=['{tmp_path}/track.py:Mine']"
    done = orchestray_here("train", own_task(tmp_path, text), trackers, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1
    assert (tmp_path / "notes.txt").read_text() == "start mine False\nfailed\n"
    assert "mine: worker 0: building" in done.stderr.splitlines()
    cause = f"SystemExit: giving up ({tmp_path}/mine.py, line 22)"
    assert done.stderr.splitlines()[-1] == f"The model or its loss failed at step 1 on worker 0: {cause}"
    assert (tmp_path / "runs" / "mine" / "logs" / "worker-0.log").read_text() == "building\n"
    assert "worker_lost" not in (tmp_path / "runs" / "mine" / "events.jsonl").read_text()


def test_an_empty_dataset_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    pq.write_table(table(0), tmp_path / "empty.parquet")
    said = refused(
        tmp_path,
        config=parquet_config(tmp_path, tmp_path / "empty.parquet", num_classes="2"),
        status=1,
        cluster=cluster,
    )
    assert "has no rows" in said or "is empty" in said


def test_a_dataset_smaller_than_a_batch_trains_with_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    config = own_task(tmp_path, TASK.replace("LOSS", ".mean()"))
    done = orchestray_here("train", config, "train.batch_size=64", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "warning: the data has 2 samples, fewer than one batch of 64" in done.stderr


def test_a_missing_column_names_those_there_are(cluster: Cluster, tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "table.parquet")
    config = parquet_config(tmp_path, tmp_path / "table.parquet", features="[x, xx]")
    said = refused(tmp_path, config=config, status=2, cluster=cluster)
    assert "'xx'" in said
    assert "x, y" in said


def test_nan_in_the_data_names_the_sample(cluster: Cluster, tmp_path: Path) -> None:
    rows = table(64)
    x = rows["x"].to_numpy().copy()
    x[7] = np.nan
    pq.write_table(rows.set_column(0, "x", pa.array(x, from_pandas=False)), tmp_path / "nan.parquet")
    said = refused(
        tmp_path,
        "task.validation_fraction=0.001",
        "train.batch_size=64",
        config=parquet_config(tmp_path, tmp_path / "nan.parquet"),
        status=1,
        cluster=cluster,
    )
    assert "The loss became nan at step 1 on worker 0" in said
    assert "The data itself holds NaN or infinity in sample(s) 7" in said


def test_a_truncated_parquet_file_is_named(cluster: Cluster, tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(table(4096), whole)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    said = refused(tmp_path, config=parquet_config(tmp_path, cut), status=1, cluster=cluster)
    assert "cut.parquet" in said


def test_a_run_name_in_use_is_refused_and_nothing_is_touched(cluster: Cluster, tmp_path: Path) -> None:
    taken = tmp_path / "runs" / "digits"
    taken.mkdir(parents=True)
    (taken / "precious").write_text("data")
    said = refused(tmp_path, status=2, cluster=cluster)
    assert "run name 'digits' is in use" in said
    assert [path.name for path in taken.iterdir()] == ["precious"]


def test_a_run_directory_that_cannot_be_written_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    said = refused(tmp_path, status=1, cluster=cluster)
    assert f"could not create the run directory {tmp_path / 'runs' / 'digits'}" in said


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "nonsense"])
def test_a_ray_address_that_does_not_answer_is_named(tmp_path: Path, address: str) -> None:
    said = refused(tmp_path, "--address", address, status=1)
    assert address in said


def test_more_gpus_than_there_are_says_what_the_cluster_has(cluster: Cluster, tmp_path: Path) -> None:
    said = refused(tmp_path, "resources.gpus_per_worker=2", status=1, cluster=cluster)
    assert "The cluster cannot place 2 worker(s) with 1 CPU and 2 GPU each: that is 4 GPU, and it has 1 node(s)" in said
    events = (tmp_path / "runs/digits/events.jsonl").read_text()
    assert "a worker computes on the first of its GPUs, and only reserves the others" in events


def test_resume_with_another_config_names_the_keys_that_matter(cluster: Cluster, tmp_path: Path) -> None:
    done = orchestray_here("train", DIGITS, "train.epochs=1", "--runs-dir", tmp_path / "runs", "--quiet")
    assert done.returncode == 0, done.stderr
    changed = ["train.epochs=2", "train.batch_size=32", "strategy.network.data=1"]
    said = refused(tmp_path, "--resume", *changed, status=2, cluster=cluster)
    assert "a resumed run may not change train.batch_size (was 64, now 32); to start a run with that, leave out" in said
    assert len(said.strip().splitlines()) == 1


def test_resume_of_a_run_that_is_not_there_says_so(cluster: Cluster, tmp_path: Path) -> None:
    assert "there is no run 'digits'" in refused(tmp_path, "--resume", status=2, cluster=cluster)

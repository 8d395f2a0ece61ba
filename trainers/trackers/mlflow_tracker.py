"""MLflow as a tracker: a store of files beside the runs, or what MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from orchestray.trainers.trackers.base import identity_of
from orchestray.trainers.trackers.mlflow_names import clean, params_of

_STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_ID = "orchestray.id"
"""Tag by which a run that goes on finds its record."""
_MOST_PARAMS = 100
"""Number of parameters that MLflow takes at once."""
_LOSS = "train/loss"


class MlflowTracker:
    """A run in MLflow, in the experiment of MLFLOW_EXPERIMENT_NAME, or `orchestray`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for this consent to a store of files
        store = (directory.parent / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or store)
        self._run_id = ""

    def start(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        client, identity = self._client, identity_of(self._directory)
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "orchestray"
        experiment = client.get_experiment_by_name(experiment_name)
        experiment_id = client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        found = client.search_runs([experiment_id], f"tags.`{_ID}` = '{identity}'", max_results=1) if resumed else []
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return max((metric.step for metric in client.get_metric_history(self._run_id, _LOSS)), default=None)
        tags = {_ID: identity, "orchestray.path": str(self._directory)}
        self._run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        params = [Param(key, value) for key, value in params_of(config).items()]
        for begin in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._run_id, params=params[begin : begin + _MOST_PARAMS])
        return None

    def log(self, metrics: dict[str, float], step: int) -> None:
        now_ms = round(time.time() * 1e3)
        split = {name: name.partition("/") for name in metrics}
        values = {f"{clean(split[name][0])}/{clean(split[name][2])}": value for name, value in metrics.items()}
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def finish(self, status: str) -> None:
        self._client.log_batch(self._run_id, tags=[RunTag("orchestray.status", status)])
        self._client.set_terminated(self._run_id, _STATUSES.get(status, "FAILED"))

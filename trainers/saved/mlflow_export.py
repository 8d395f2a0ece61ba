"""Export of a run to MLflow's file store, so that MLflow's pages and clients show it.

The files are written directly, since mlflow is not a dependency. The layout is that of
`mlflow/store/tracking/file_store.py` (`FileStore`); the allowed names are those of `mlflow/utils/validation.py`:

    <store>/<experiment id>/meta.yaml
    <store>/<experiment id>/<run id>/meta.yaml
    <store>/<experiment id>/<run id>/params/<key>         the value
    <store>/<experiment id>/<run id>/metrics/<name>       lines of `<timestamp, ms> <value> <step>`
    <store>/<experiment id>/<run id>/tags/<key>           the value
    <store>/<experiment id>/<run id>/artifacts/           files
"""

from __future__ import annotations

import getpass
import hashlib
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestray.platform.errors import ConfigError, StorageError
from orchestray.platform.run.directory import RunPaths
from orchestray.platform.run.files import remove_tree, storage_errors, temporary_sibling, write_atomic
from orchestray.platform.run.metrics import read_lines
from orchestray.trainers.saved.run import summarize
from orchestray.trainers.trackers.base import flatten, is_number
from orchestray.trainers.trackers.mlflow_names import clean, named, params_of

if TYPE_CHECKING:
    from orchestray.trainers.saved.run import Run

# Enumerations of mlflow's service.proto; meta.yaml contains their numbers.
_STATUSES = {"running": 1, "succeeded": 3, "failed": 4, "interrupted": 5, "died": 5}
_LOCAL_SOURCE = 4
_DEFAULT_EXPERIMENT = ("0", "Default")
_PLACES = frozenset({"step", "time_s", "split"})
"""Keys of a metric line that say where it belongs."""
_MAX_TAG, _MAX_EXPERIMENT = 5000, 500
"""Largest numbers of characters that mlflow accepts in a value or an experiment's name."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    """Directory of the run in the store."""
    experiment_id: str
    run_id: str
    num_params: int
    num_metrics: int


def export_to_mlflow(run: Run, store: Path, *, experiment: str = "orchestray") -> Exported:
    """Write a run into MLflow's file store: config as parameters, metrics with their history, and files.

    A second export of the same run replaces the first. Parameters are the keys of `config.yaml`, dotted. Metrics are
    the numbers of `metrics.jsonl` (`train/<key>`, `validation/<key>`; nan for JSON's null) and of `result.json`
    (`result/<key>`, at the last step). Characters that MLflow forbids in a name become `_`.

    Args:
        run: finished or not.
        store: directory for `mlflow ui --backend-store-uri`; created if it is missing.
        experiment: name of MLflow's experiment; created if it is missing.

    Raises:
        ConfigError: MLflow would refuse the experiment's name, or has the experiment in its trash.
        StorageError: the run is damaged, or the store is not writable.
    """
    if not 0 < len(experiment) <= _MAX_EXPERIMENT:
        raise ConfigError(f"experiment: must have 1 to {_MAX_EXPERIMENT} characters, got {len(experiment)}")
    store = store.absolute()
    with storage_errors(f"write {store}"):
        if not store.exists():
            store.mkdir(parents=True)
            _write_experiment(store, *_DEFAULT_EXPERIMENT)
        experiment_id = _experiment_id(store, experiment)
    # Exporting a run again yields the same id. The experiment is part of it, because mlflow finds runs by id only.
    run_id = hashlib.sha256(f"{experiment_id}\n{run.path}".encode()).hexdigest()[:32]
    path = store / experiment_id / run_id
    written = temporary_sibling(path)
    params, metrics = params_of(run.config.model_dump(mode="json")), _metrics(run)
    try:
        with storage_errors(f"write {path}"):
            _write_values(written / "params", params)
            _write_values(written / "metrics", {name: "".join(lines) for name, lines in metrics.items()})
            _write_values(written / "tags", _tags(run))
            _copy_artifacts(run, written / "artifacts")
            meta = _meta(run, experiment_id, run_id, path / "artifacts")
            (written / "meta.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
            remove_tree(path)
            written.replace(path)
    finally:
        remove_tree(written)
    return Exported(path, experiment_id, run_id, len(params), len(metrics))


# -- the experiment ----------------------------------------------------------------------------------------------------


def _experiment_id(store: Path, name: str) -> str:
    """Return the id of the experiment of that name, which is created if it is missing."""
    for meta in sorted(store.glob("*/meta.yaml")):
        if (found := _read_meta(meta)).get("name") == name:
            return str(found["experiment_id"])
    # mlflow's own ids are random numbers of 18 digits.
    experiment_id = str(10**17 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % (9 * 10**17))
    if (store / ".trash" / experiment_id).exists():
        raise ConfigError(
            f"experiment: {name!r} is deleted, but still in {store / '.trash'}: "
            f"`mlflow experiments restore -x {experiment_id}` brings it back; or name another by --experiment"
        )
    _write_experiment(store, experiment_id, name)
    return experiment_id


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StorageError(f"could not read {path}: it is no YAML; the file was damaged") from error
    return meta if isinstance(meta, dict) and "experiment_id" in meta else {}


def _write_experiment(store: Path, experiment_id: str, name: str) -> None:
    now_ms = round(time.time() * 1e3)
    meta = {
        "artifact_location": (store / experiment_id).as_uri(),
        "creation_time": now_ms,
        "experiment_id": experiment_id,
        "last_update_time": now_ms,
        "lifecycle_stage": "active",
        "name": name,
    }
    (store / experiment_id).mkdir(exist_ok=True)
    write_atomic(store / experiment_id / "meta.yaml", yaml.safe_dump(meta).encode())


# -- the run -----------------------------------------------------------------------------------------------------------


def _meta(run: Run, experiment_id: str, run_id: str, artifacts: Path) -> dict[str, Any]:
    started_s = _started_s(run)
    seconds = run.result.get("seconds")
    return {
        "artifact_uri": artifacts.as_uri(),
        "deleted_time": None,
        "end_time": None if seconds is None else round((started_s + seconds) * 1e3),
        "entry_point_name": "",
        "experiment_id": experiment_id,
        "lifecycle_stage": "active",
        "run_id": run_id,
        "run_name": run.name,
        "run_uuid": run_id,
        "source_name": "",
        "source_type": _LOCAL_SOURCE,
        "source_version": "",
        "start_time": round(started_s * 1e3),
        "status": _STATUSES[run.status],
        "tags": [],
        "user_id": _user(),
    }


def _started_s(run: Run) -> float:
    """Return the Unix time of the run's start.

    A run that was never trained here, such as the best of a search, has its config's time.
    """
    return summarize(run.path).started_at or RunPaths(run.path).config.stat().st_mtime


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, common in containers
        return "unknown"


def _metrics(run: Run) -> dict[str, list[str]]:
    """Return the lines of each metric, in the order of the run."""
    started_s, step = _started_s(run), 0
    found: dict[tuple[str, str], list[str]] = {}
    for line in read_lines(RunPaths(run.path).metrics):
        step = int(line["step"])
        at_ms = round((started_s + float(line.get("time_s") or 0.0)) * 1e3)
        for key, value in line.items():
            if key not in _PLACES and (value is None or is_number(value)):
                text = repr(math.nan if value is None else value)
                found.setdefault((str(line.get("split", "train")), key), []).append(f"{at_ms} {text} {step}\n")
    result = run.result
    ended_ms = round((started_s + float(result.get("seconds") or 0.0)) * 1e3)
    for key, value in flatten(result):
        if is_number(value):
            found["result", key] = [f"{ended_ms} {value!r} {step}\n"]
    every: dict[str, list[str]] = {}
    for split in dict.fromkeys(split for split, _ in found):
        of_split = ((key, lines) for (other, key), lines in found.items() if other == split)
        every |= {f"{clean(split)}/{name}": lines for name, lines in named(of_split)}
    return every


def _tags(run: Run) -> dict[str, str]:
    tags = {
        "mlflow.runName": run.name,
        "mlflow.user": _user(),
        "mlflow.source.name": "orchestray",
        "mlflow.source.type": "LOCAL",
        "orchestray.path": str(run.path),
        "orchestray.status": run.status,
    }
    if error := run.result.get("error"):
        tags["orchestray.error"] = str(error)[:_MAX_TAG]
    return tags


def _copy_artifacts(run: Run, folder: Path) -> None:
    """Copy the trained model and the run's own files, which hold all that parameters and metrics cannot."""
    paths = RunPaths(run.path)
    folder.mkdir(parents=True)
    for file in (paths.config, paths.metrics, paths.events, paths.result):
        if file.is_file():
            shutil.copy2(file, folder)
    if paths.model.is_dir():
        shutil.copytree(paths.model, folder / "model")


def _write_values(folder: Path, values: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in values.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="")

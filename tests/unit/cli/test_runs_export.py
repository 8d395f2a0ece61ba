"""`orchestray runs export --mlflow`: what MLflow's FileStore reads of it is the run."""

from __future__ import annotations

import filecmp
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml

from orchestray.platform.errors import ConfigError
from orchestray.trainers.saved.mlflow_export import export_to_mlflow
from orchestray.trainers.saved.run import load_run
from support.cli import orchestray_here as orchestray
from support.cli import read_lines as read_jsonl
from support.run_directories import WrittenRun

NAME = re.compile(r"[/\w.\- ]+")
"""Names that `mlflow.utils.validation` allows."""


class FileStore:
    """A reader like `mlflow.store.tracking.file_store.FileStore`: each method is one of its `_get_*`."""

    def __init__(self, root: Path) -> None:
        self.experiments: dict[str, dict[str, Any]] = {}
        for folder in (entry for entry in root.iterdir() if entry.is_dir() and entry.name != ".trash"):
            meta = yaml.safe_load((folder / "meta.yaml").read_text())
            assert (meta["experiment_id"], meta["lifecycle_stage"]) == (folder.name, "active")
            assert re.fullmatch(r"[a-zA-Z0-9][\w\-]{0,63}", folder.name)
            assert local(meta["artifact_location"]) == folder
            self.experiments[meta["name"]] = {"folder": folder, **meta}

    def runs(self, experiment: str) -> list[Path]:
        return [path for path in self.experiments[experiment]["folder"].iterdir() if path.is_dir()]

    @staticmethod
    def meta(run: Path) -> dict[str, Any]:
        meta: dict[str, Any] = yaml.safe_load((run / "meta.yaml").read_text())
        assert meta["run_id"] == meta["run_uuid"] == run.name
        assert re.fullmatch(r"[a-zA-Z0-9][\w\-]{0,255}", run.name)
        assert meta["experiment_id"] == run.parent.name
        assert local(meta["artifact_uri"]) == run / "artifacts"
        return meta

    @staticmethod
    def texts(run: Path, kind: str) -> dict[str, str]:
        found = {file.relative_to(run / kind).as_posix(): file for file in (run / kind).rglob("*") if file.is_file()}
        assert all(NAME.fullmatch(name) and len(name) <= 250 for name in found)
        return {name: file.read_text() for name, file in found.items()}

    @classmethod
    def metrics(cls, run: Path) -> dict[str, list[tuple[int, float, int]]]:
        histories = {}
        for name, text in cls.texts(run, "metrics").items():
            parts = [line.strip().split(" ") for line in text.splitlines()]
            histories[name] = [(int(at_ms), float(value), int(step)) for at_ms, value, step in parts]
        return histories


def local(uri: str) -> Path:
    parsed = urlparse(uri)
    assert parsed.scheme == "file"
    return Path(parsed.path)


def finished_run(runs_dir: Path, name: str = "digits") -> Path:
    run = WrittenRun(runs_dir, name)
    run.steps(46)
    model = run.path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(range(100)))
    (model / "model.json").write_text("{}")
    run.finish()
    return run.path


def test_what_is_exported_and_read_back_by_the_layout_are_the_runs_config_metrics_result_and_model(
    tmp_path: Path,
) -> None:
    path, store_path = finished_run(tmp_path / "runs"), tmp_path / "mlruns"
    done = orchestray("runs", "export", path, "--mlflow", store_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    store = FileStore(store_path)
    assert set(store.experiments) == {"Default", "orchestray"}
    assert store.experiments["Default"]["experiment_id"] == "0"
    assert store.runs("Default") == []
    (run,) = store.runs("orchestray")
    assert (told["path"], told["run_id"], told["experiment_id"]) == (str(run), run.name, run.parent.name)

    meta, result = store.meta(run), json.loads((path / "result.json").read_text())
    assert (meta["run_name"], meta["status"], meta["lifecycle_stage"]) == ("digits", 3, "active")
    assert meta["end_time"] - meta["start_time"] == pytest.approx(1e3 * result["seconds"], abs=1)
    tags = store.texts(run, "tags")
    assert (tags["mlflow.runName"], tags["orchestray.path"]) == ("digits", str(path))

    params = store.texts(run, "params")
    assert len(params) == told["params"]
    config = load_run(path).config.model_dump(mode="json")
    for key, text in params.items():
        value: Any = config
        for part in key.split("."):
            value = value[part]
        assert text == (value if isinstance(value, str) else json.dumps(value)), key
    assert (params["train.optimizer.lr"], params["task.type"], params["task.hidden"]) == ("0.1", "digits", "[128, 128]")

    metrics = store.metrics(run)
    assert len(metrics) == told["metrics"]
    wanted: dict[str, list[tuple[int, float, int]]] = {}
    for line in read_jsonl(path / "metrics.jsonl"):
        at_ms = meta["start_time"] + 1e3 * line["time_s"]
        for key in line.keys() - {"step", "time_s", "split"}:
            wanted.setdefault(f"{line.get('split', 'train')}/{key}", []).append((at_ms, line[key], line["step"]))
    assert {name for name in metrics if not name.startswith("result/")} == set(wanted)
    for name, history in wanted.items():
        assert [each[1:] for each in metrics[name]] == [each[1:] for each in history]  # to the bit
        assert [each[0] for each in metrics[name]] == pytest.approx([each[0] for each in history], abs=1)
    assert [each[1:] for each in metrics["result/final.train.loss"]] == [(result["final"]["train"]["loss"], 46)]
    assert metrics["result/staleness.max"][0][1] == 2

    artifacts = run / "artifacts"
    for file in ("config.yaml", "result.json", "metrics.jsonl", "model/model.safetensors", "model/model.json"):
        assert filecmp.cmp(artifacts / file, path / file, shallow=False)


def test_a_run_exported_again_takes_its_own_place_and_one_that_goes_on_is_running(tmp_path: Path) -> None:
    store_path = tmp_path / "mlruns"
    live = WrittenRun(tmp_path / "runs", "live")
    other = export_to_mlflow(load_run(finished_run(tmp_path / "runs")), store_path)
    live.steps(3)
    first = export_to_mlflow(load_run(live.path), store_path)
    assert (FileStore.meta(first.path)["status"], FileStore.meta(first.path)["end_time"]) == (1, None)
    live.steps(2)
    live.finish("failed", "the loss is nan")
    again = export_to_mlflow(load_run(live.path), store_path)
    assert again.path == first.path
    assert sorted(FileStore(store_path).runs("orchestray")) == sorted([first.path, other.path])
    assert FileStore.meta(again.path)["status"] == 4
    assert FileStore.texts(again.path, "tags")["orchestray.error"] == "the loss is nan"
    assert [step for _, _, step in FileStore.metrics(again.path)["train/loss"]] == [1, 2, 3, 4, 5]


def test_names_that_mlflow_forbids_are_cleaned_and_stay_apart_and_a_loss_that_is_none_is_nan(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "runs", "odd")
    lines = [{"step": 1, "time_s": 1.0, "split": "validation", "top@5": 0.5, "top:5": 0.25, "..": 1, "a/b": 2, "a": 3}]
    run._metrics.append_lines([{"step": 1, "time_s": 1.0, "loss": math.nan, "of": [1, 2], "who": "x"}, *lines])
    run.finish()
    metrics = FileStore.metrics(export_to_mlflow(load_run(run.path), tmp_path / "mlruns").path)
    values = {name: history[0][1] for name, history in metrics.items() if not name.startswith("result/")}
    assert math.isnan(values.pop("train/loss"))
    assert values == {
        "validation/top_5": 0.5,
        "validation/top_5_2": 0.25,
        "validation/_..": 1,
        "validation/a_b": 2,
        "validation/a": 3,
    }


def test_an_experiment_that_is_there_is_used_and_one_in_the_trash_is_refused(tmp_path: Path) -> None:
    store, run = tmp_path / "mlruns", load_run(finished_run(tmp_path / "runs"))
    theirs = store / "123456789"
    theirs.mkdir(parents=True)
    meta = {"experiment_id": theirs.name, "name": "theirs", "lifecycle_stage": "active"}
    (theirs / "meta.yaml").write_text(yaml.safe_dump(meta))
    assert export_to_mlflow(run, store, experiment="theirs").path.parent == theirs
    assert not (store / "0").exists()  # a store that is there is left as it is
    ours = export_to_mlflow(run, store).path.parent
    (store / ".trash").mkdir()
    ours.rename(store / ".trash" / ours.name)
    with pytest.raises(ConfigError, match=f"mlflow experiments restore -x {ours.name}"):
        export_to_mlflow(run, store)
    with pytest.raises(ConfigError, match="experiment: must have"):
        export_to_mlflow(run, store, experiment="")


def test_a_run_that_is_not_there_and_a_store_that_is_a_file_are_told_in_a_sentence(tmp_path: Path) -> None:
    absent = orchestray("runs", "export", tmp_path / "absent", "--mlflow", tmp_path / "mlruns")
    assert (absent.returncode, "there is no run in" in absent.stderr) == (2, True)
    assert not (tmp_path / "mlruns").exists()
    (tmp_path / "file").touch()
    refused = orchestray("runs", "export", finished_run(tmp_path), "--mlflow", tmp_path / "file")
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert str(tmp_path / "file") in refused.stderr

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import CheckpointError, RunNameError, StorageError
from orchestray.platform.run.checkpoint import CheckpointWriter, save_model
from orchestray.platform.run.checkpoint_files import BEST_STEP
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.saved.run import list_runs, list_searches, load_run
from support.cli import orchestray_here as orchestray

TASK = {"type": "digits", "hidden": [16]}
RESULT = {
    "status": "succeeded",
    "steps": 3,
    "seconds": 2.5,
    "final": {"train": {"loss": 0.5}, "validation": {"accuracy": 0.75, "loss": 0.6}},
}


def make_run(runs_dir: Path, name: str, *, num_steps: int = 3, age: int = 0) -> RunDirectory:
    run = RunDirectory.create(runs_dir, name)
    config = load_train_config(
        {"name": name, "task": TASK, "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}}}
    )
    run.write_config(dump_yaml(config))
    with RunWriter(run, clock=lambda: 2.0) as writer:
        writer.event("started", workers=1)
        for step in range(1, num_steps + 1):
            writer.metrics([{"step": step, "epoch": 1, "time_s": step / 2, "loss": 1.0 / step}])
            writer.metrics([{"step": step, "time_s": step / 2, "split": "validation", "loss": 0.9, "accuracy": 0.1}])
    os.utime(run.paths.lock, (1000.0 - age, 1000.0 - age))
    return run


def test_a_finished_run_is_read_back(tmp_path: Path) -> None:
    with make_run(tmp_path, "a") as written:
        written.write_result(RESULT)
        with CheckpointWriter(written.paths.checkpoints, 2) as checkpoints:
            checkpoints.save_async(3, {"w": torch.zeros(2)}, {}, {})
    run = load_run(tmp_path / "a")
    assert (run.name, run.path, run.status) == ("a", tmp_path / "a", "succeeded")
    assert run.result == RESULT
    assert run.config.train.steps == 3
    assert run.metrics().num_rows == 6
    assert [event["event"] for event in run.events()] == ["started"]
    assert [found.step for found in run.checkpoints()] == [3]


def test_the_trained_model_comes_back_on_the_cpu_with_its_weights(tmp_path: Path) -> None:
    source = TaskSource.from_config(load_train_config({"name": "a", "task": TASK, "train": minimal_train()}).task)
    torch.manual_seed(1)
    trained = tasks.build(source).build_model()
    with make_run(tmp_path, "a") as written:
        save_model(written.paths.model, model_tensors(trained), {"task": source.to_json()})
    run = load_run(tmp_path / "a")
    model = run.load_model()
    assert not model.training
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in trained.state_dict().items()
    }
    assert type(run.load_task()) is type(tasks.build(source))


def test_the_model_of_a_checkpoint_is_loaded_by_its_step_or_as_the_best(tmp_path: Path) -> None:
    source = TaskSource.from_config(load_train_config({"name": "a", "task": TASK, "train": minimal_train()}).task)
    models = {step: tasks.build(source).build_model() for step in (1, 2)}
    with (
        make_run(tmp_path, "a") as written,
        CheckpointWriter(written.paths.checkpoints, 1) as checkpoints,
    ):
        for step, model in models.items():
            checkpoints.save_async(step, model_tensors(model), {}, {BEST_STEP: 1})
    run = load_run(tmp_path / "a")
    for which, step in (("best", 1), (1, 1), (2, 2)):
        loaded = run.load_model(which)  # type: ignore[arg-type]
        assert not loaded.training
        assert all(map(torch.equal, model_tensors(loaded).values(), model_tensors(models[step]).values()))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 \(it has those of the steps: 1, 2\)"):
        run.load_model(3)
    shown = json.loads(orchestray("runs", "show", "a", "--json", "--runs-dir", str(tmp_path)).stdout)
    assert [(one["step"], one["best"]) for one in shown["checkpoints"]] == [(1, True), (2, False)]


def minimal_train() -> dict[str, Any]:
    return {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}}


def test_a_model_that_is_missing_or_damaged_says_so(tmp_path: Path) -> None:
    with make_run(tmp_path, "a") as written:
        run = load_run(written.path)
        with pytest.raises(CheckpointError, match=r"there is no trained model in .*: the run has not finished"):
            run.load_model()
        save_model(written.paths.model, {"w": torch.zeros(100)}, {"task": {}})
        file = written.paths.model / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"\1")
        with pytest.raises(CheckpointError, match=r"a/model is damaged \(model\.safetensors: checksum differs\)"):
            run.load_model()
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: \d+ bytes, wanted \d+"):
            run.load_model()
        (written.paths.model / "model.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"model\.json is damaged"):
            run.load_model()


def test_a_model_saved_from_bytes_is_the_same(tmp_path: Path) -> None:
    from orchestray.platform.run.model_files import load_model_tensors
    from orchestray.platform.run.tensor_file import pack

    tensors = {"w": torch.arange(5.0)}
    save_model(tmp_path / "model", pack(tensors), {"task": {}})
    assert load_model_tensors(tmp_path / "model")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_place_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNameError, match=r"there is no run in .*: wanted a directory with a config.yaml"):
        load_run(tmp_path)


def test_the_status_tells_running_died_and_ended_apart(tmp_path: Path) -> None:
    make_run(tmp_path, "died", age=3).close()
    with make_run(tmp_path, "ended", age=2) as ended:
        ended.write_result({**RESULT, "status": "interrupted"})
    with make_run(tmp_path, "alive", num_steps=2, age=1):
        (tmp_path / "no run").mkdir()
        summaries = list_runs(tmp_path)
    assert [(run.name, run.status, run.steps, run.loss) for run in summaries] == [
        ("died", "died", 3, pytest.approx(1 / 3)),
        ("ended", "interrupted", 3, 0.5),
        ("alive", "running", 2, 0.5),
    ]
    assert summaries[0].metrics == {"accuracy": 0.1, "loss": 0.9}
    assert list(summaries[1].metrics.items()) == [("accuracy", 0.75), ("loss", 0.6)]
    assert [run.seconds for run in summaries] == [1.5, 2.5, 1.0]
    assert list_runs(tmp_path / "nothing") == []


def test_a_damaged_result_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    with make_run(tmp_path, "a", age=1) as broken:
        broken.paths.result.write_text("{")
    make_run(tmp_path, "b").close()
    assert [(run.name, run.status) for run in list_runs(tmp_path)] == [("a", "damaged"), ("b", "died")]
    with pytest.raises(StorageError, match=r"result\.json: it is not JSON"):
        _ = load_run(tmp_path / "a").result


def test_the_command_line_lists_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert orchestray("runs", "list").stdout == "There are no runs in runs.\n"
    with make_run(tmp_path / "runs", "a") as run:
        run.write_result(RESULT)
    lines = orchestray("runs", "list").stdout.splitlines()
    assert lines[0].split() == ["name", "status", "steps", "loss", "metric", "time", "started"]
    assert lines[1].split()[:8] == ["a", "succeeded", "3", "0.5", "accuracy", "0.75", "2.5", "s"]
    outcome = orchestray("runs", "list", "--runs-dir", tmp_path / "runs", "--json")
    [summary] = json.loads(outcome.stdout.splitlines()[-1])
    assert summary["validation"] == {"accuracy": 0.75, "loss": 0.6}


def test_the_command_line_shows_a_run(tmp_path: Path) -> None:
    with make_run(tmp_path, "a") as run:
        run.write_result(RESULT)
    outcome = orchestray("runs", "show", "a", "--runs-dir", tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    for text in ("a  succeeded", "digits hidden=[16]", "accuracy 0.75  loss 0.6", "started  workers=1", "Loss of the"):
        assert text in outcome.stdout
    shown = json.loads(orchestray("runs", "show", "a", "--runs-dir", tmp_path, "--json").stdout.splitlines()[-1])
    assert shown["result"] == RESULT
    assert shown["config"]["task"]["hidden"] == [16]


def test_the_command_line_refuses_an_unknown_run_in_one_sentence(tmp_path: Path) -> None:
    outcome = orchestray("runs", "show", "nope", "--runs-dir", tmp_path)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("there is no run in ")
    assert len(outcome.stderr.splitlines()) == 1


def test_searches_are_listed_apart_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("name: x\n")
        (tmp_path / name / "trials.jsonl").touch()
    assert list_searches(tmp_path) == ["a", "b"]
    assert list_runs(tmp_path) == []
    assert list_searches(tmp_path / "nothing") == []
    assert "Searches there" in orchestray("runs", "list", "--runs-dir", ".").stdout

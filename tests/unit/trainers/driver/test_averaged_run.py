"""A run made of the last checkpoints of another one: its weights, its statistics, and what it says of itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from orchestray.cli.app import app
from orchestray.platform.errors import CheckpointError, RunNameError
from orchestray.platform.run.checkpoint import CheckpointWriter, load_checkpoint
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.averaged_run import write_average
from orchestray.trainers.saved.run import Run, load_run
from orchestray.trainers.saved.snapshots import average_snapshots
from support.layouts import train_laid_out
from support.training import same_bits


def trained(folder: Path, *, strategy: dict[str, Any] | None = None, **task: Any) -> Run:
    """Train a run of 6 steps that keeps the checkpoints of steps 2, 4 and 6, and has not finished."""
    train = {"batch_size": 48, "steps": 6, "optimizer": {"type": "sgd", "lr": 0.2}, "precision": "float64"}
    config = load_train_config(
        {
            "name": "a",
            "task": {"type": "digits", "hidden": [16], **task},
            "train": train,
            "strategy": strategy or {},
            "checkpoint": {"every_steps": 2, "keep": 3},
        }
    )
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    with RunDirectory.create(folder, "a") as run:
        run.write_config(dump_yaml(config))
        location = run.paths.checkpoints
        train_laid_out(
            lambda: tasks.build(settings.task),
            settings,
            checkpoints=lambda: CheckpointWriter(location, keep=3),
            task_of=lambda member: tasks.build(settings.task_of(member)),
        )
        return load_run(run.path)


def snapshots(run: Run) -> list[dict[str, Tensor]]:
    return [load_checkpoint(found)[0] for found in run.checkpoints()]


def test_the_written_model_is_the_mean_of_the_last_checkpoints_weight_by_weight(tmp_path: Path) -> None:
    run = trained(tmp_path)
    written = write_average(run, name="b", runs_dir=tmp_path, last=2)
    first, second = snapshots(run)[-2:]
    for name, value in written.load_model().state_dict().items():
        assert float((value - (first[name] + second[name]) / 2).abs().max()) <= 1e-15
    assert (written.status, written.config.name) == ("succeeded", "b")
    assert written.result["averaged"] == {"run": "a", "steps": [4, 6], "what": "weights"}


def test_statistics_of_batch_normalisation_are_measured_anew_and_written(tmp_path: Path) -> None:
    run = trained(tmp_path, batch_norm=True)
    model = write_average(run, name="b", runs_dir=tmp_path).load_model()
    assert same_bits(dict(model.state_dict()), dict(average_snapshots(run, 3).state_dict()))
    averaged = sum(state["1.running_mean"] for state in snapshots(run)) / 3
    assert not torch.allclose(model.state_dict()["1.running_mean"], averaged, atol=1e-3)


def test_a_loss_in_the_validation_gets_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    task: Any = run.load_task()

    class Rising(type(task)):  # type: ignore[misc]
        def loss(self, outputs: Tensor, batch: Any, step: int) -> Tensor:
            found: Tensor = super().loss(outputs, batch)
            return found * step

    rising = copy.copy(task)
    rising.__class__ = Rising
    plain = write_average(run, name="plain", runs_dir=tmp_path).result["final"]["validation"]["loss"]
    monkeypatch.setattr(Run, "load_task", lambda _: rising)
    found = write_average(run, name="rising", runs_dir=tmp_path).result["final"]["validation"]["loss"]
    assert found == pytest.approx(6 * plain)


@pytest.mark.parametrize("as_ensemble", [False, True])
def test_the_result_has_the_validation_of_the_written_model(tmp_path: Path, as_ensemble: bool) -> None:
    written = write_average(trained(tmp_path), name="b", runs_dir=tmp_path, as_ensemble=as_ensemble)
    model: Any = written.load_model()
    task = written.load_task()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        inputs = batch["inputs"].double()
        outputs = model.logits(inputs) if as_ensemble else model(inputs)
    told = written.result["final"]["validation"]
    assert told["loss"] == pytest.approx(float(task.loss(outputs, batch)), rel=1e-6)
    assert told["accuracy"] == pytest.approx(float(task.metrics(outputs, batch)["accuracy"]), abs=1e-6)


def test_an_ensemble_of_checkpoints_answers_with_the_mean_of_their_probabilities(tmp_path: Path) -> None:
    run = trained(tmp_path)
    model: Any = write_average(run, name="b", runs_dir=tmp_path, as_ensemble=True).load_model()
    inputs = torch.rand(5, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = sum(own(inputs).softmax(1) for own in model.members) / 3
        assert float((model(inputs) - expected).abs().max()) <= 1e-12
    for own, state in zip(model.members, snapshots(run), strict=True):
        assert same_bits(dict(own.state_dict()), state)


@pytest.mark.parametrize("as_ensemble", [False, True])
def test_members_of_several_shapes_are_averaged_and_loaded(tmp_path: Path, as_ensemble: bool) -> None:
    members = [{"task.hidden": [8]}, {}]
    strategy = {"network": {"data": 2}, "exchange": {"type": "independent", "members": members}}
    run = trained(tmp_path, strategy=strategy)
    model: Any = write_average(run, name="b", runs_dir=tmp_path, as_ensemble=as_ensemble).load_model()
    widths = [own[0].out_features for own in model.members]
    assert widths == [8, 16] * (3 if as_ensemble else 1)


def test_what_cannot_be_averaged_leaves_no_run(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(CheckpointError, match="has 3 checkpoints, and the last 7"):
        write_average(run, name="b", runs_dir=tmp_path, last=7)
    with pytest.raises(RunNameError, match="'a' is in use"):
        write_average(run, name="a", runs_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_command_writes_a_run_beside_the_one_it_is_made_of(tmp_path: Path) -> None:
    trained(tmp_path)
    done = CliRunner().invoke(app, ["runs", "average", "a", "--runs-dir", str(tmp_path), "--last", "2"])
    assert done.exit_code == 0
    first, second, third = done.stdout.splitlines()
    assert first == "a-average: the mean weights of a at the steps 4, 6"
    assert second.startswith("validation  accuracy 0.")
    assert third == f"Wrote {tmp_path / 'a-average'}."
    assert load_run(tmp_path / "a-average").status == "succeeded"

"""Several checkpoints of a run as one model: the mean of their weights, or an ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.endless import Endless
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.ensemble.ensemble import Ensemble
from orchestray.trainers.saved.run import Run, load_run
from orchestray.trainers.saved.snapshots import (
    average_snapshots,
    mean_tensors,
    measure_statistics,
    snapshot_ensemble,
)
from orchestray.trainers.tasks.digits import Digits
from support.layouts import train_laid_out
from support.training import digits


def test_complex_weights_have_their_mean_too() -> None:
    first, second = ({"w": torch.tensor([1 + 2j * n]), "n": torch.tensor(n)} for n in (1, 3))
    mean = mean_tensors([first, second])
    assert mean["w"].tolist() == [1 + 4j]
    assert mean["n"].item() == 3


def trained(folder: Path, *, strategy: dict[str, Any] | None = None, **task: Any) -> Run:
    """Train a run of 8 steps that keeps the checkpoints of steps 2, 4, 6 and 8."""
    task = {"hidden": [16], **task}
    config = load_train_config(
        {
            "name": "a",
            "task": {"type": "digits", **task},
            "train": {"batch_size": 48, "steps": 8, "optimizer": {"type": "sgd", "lr": 0.2}, "precision": "float64"},
            "strategy": strategy or {},
            "checkpoint": {"every_steps": 2, "keep": 4},
        }
    )
    with RunDirectory.create(folder, "a") as run:
        run.write_config(dump_yaml(config))
        settings = ReplicaSettings.from_config(config, storage="", model_directory="")
        location = run.paths.checkpoints
        train_laid_out(lambda: digits(**task), settings, checkpoints=lambda: CheckpointWriter(location, keep=4))
        return load_run(run.path)


def snapshots(run: Run, last: int) -> list[dict[str, Tensor]]:
    from orchestray.platform.run.checkpoint import load_checkpoint

    return [load_checkpoint(found)[0] for found in run.checkpoints()[-last:]]


def test_the_mean_of_the_last_checkpoints_is_taken_weight_by_weight(tmp_path: Path) -> None:
    run = trained(tmp_path)
    model = average_snapshots(run, last=3)
    states = snapshots(run, 3)
    assert not model.training
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float64
        expected = (states[0][name] + states[1][name] + states[2][name]) / 3
        assert float((value - expected).abs().max()) <= 1e-15


def test_statistics_of_data_without_end_are_measured_over_the_samples_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, batch_norm=True)
    table = digits().dataset("train").slice(0, 8 * 48)  # of eight steps
    models = []
    for data in (table, Endless(lambda _number: [table], window_rows=100)):
        monkeypatch.setattr(Digits, "dataset", lambda _task, _split, data=data: data)
        models.append(average_snapshots(run, last=2).state_dict())
    assert all(torch.allclose(models[0][name], models[1][name], rtol=1e-10) for name in models[0])


def test_the_last_checkpoint_alone_is_its_own_mean(tmp_path: Path) -> None:
    run = trained(tmp_path)
    model, [state] = average_snapshots(run, last=1), snapshots(run, 1)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_running_statistics_are_those_of_the_mean_weights(tmp_path: Path) -> None:
    run = trained(tmp_path, batch_norm=True)
    model = average_snapshots(run, last=2)
    layers: Any = model
    task = digits()
    inputs = task.to_batch(task.dataset("train"))["inputs"].double()
    batches = inputs.split(48)
    with torch.no_grad():
        means = torch.stack([layers[0](batch).mean(0) for batch in batches])
    assert layers[1].num_batches_tracked == len(batches)
    assert float((layers[1].running_mean - means.mean(0)).abs().max()) <= 1e-12
    assert layers[1].momentum == 0.1


def test_measuring_statistics_draws_nothing_and_changes_no_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    weights = [parameter.clone() for parameter in model.parameters()]
    before = torch.get_rng_state()
    measure_statistics(model, [torch.ones(3, 4), torch.ones(1, 4)])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not any(module.training for module in model.modules())


def test_statistics_are_measured_on_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            found: Tensor = self.norm(a + b)
            return found

    model, batches = Sum(), [{"a": torch.rand(5, 4), "b": torch.rand(5, 4)} for _ in range(2)]
    measure_statistics(model, batches)
    means = [(batch["a"] + batch["b"]).mean(0) for batch in batches]
    assert torch.allclose(model.norm.running_mean, (means[0] + means[1]) / 2)  # type: ignore[arg-type]


def test_an_ensemble_of_snapshots_answers_with_their_mean(tmp_path: Path) -> None:
    run = trained(tmp_path)
    ensemble = snapshot_ensemble(run, last=4, average="outputs")
    x = torch.rand(5, 64, dtype=torch.float64)
    answers = []
    for state in snapshots(run, 4):
        model = run.load_task().build_model().double()
        model.load_state_dict(state)
        answers.append(model(x))
    assert torch.allclose(ensemble(x), torch.stack(answers).mean(0), rtol=0, atol=1e-14)


def test_snapshots_of_an_ensemble_are_taken_member_by_member(tmp_path: Path) -> None:
    run = trained(tmp_path, strategy={"network": {"data": 2}, "exchange": {"type": "independent"}})
    model, states = average_snapshots(run, last=2), snapshots(run, 2)
    assert isinstance(model, Ensemble)
    name = "members.1.0.weight"
    expected = (states[0][name] + states[1][name]) / 2
    assert float((model.state_dict()[name] - expected).abs().max()) <= 1e-15
    assert len(snapshot_ensemble(run, last=3).members) == 6


def test_more_snapshots_than_there_are_are_refused_with_what_to_do(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 4 checkpoints, and the last 5 .* checkpoint\.keep=5"):
        average_snapshots(run, last=5)
    with pytest.raises(ValueError, match="1 or more"):
        snapshot_ensemble(run, last=0)


def test_different_models_have_no_mean_and_integers_are_the_last_ones() -> None:
    with pytest.raises(CheckpointError, match="different models"):
        mean_tensors([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}])
    assert mean_tensors([{"n": torch.tensor(3)}, {"n": torch.tensor(5)}]) == {"n": torch.tensor(5)}

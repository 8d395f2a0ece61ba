"""Averages of the weights under every layout: those of `torch.optim.swa_utils` in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.platform.run.checkpoint_files import best_checkpoint
from orchestray.trainers.config.goals import Best
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.saved.checkpoint_model import load_model
from orchestray.trainers.saved.snapshots import measure_statistics
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.tiny_task import TinyTask
from support.training import digits, furthest, same_bits, stream_of

TOLERANCE = 1e-12
EMA = {"type": "ema", "decay": 0.7}
SWA = {"type": "swa", "every_steps": 2, "from_step": 1}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "data of 2": ({"data": 2}, {}),
    "one micro-batch": ({"data": 2, "microbatches": 1}, {"shard": "parameters"}),
    "data of 3": ({"data": 3}, {}),
    "zero1": ({"data": 2}, {"shard": "optimizer"}),
    "zero2": ({"data": 3}, {"shard": "gradients"}),
    "zero3": ({"data": 2}, {"shard": "parameters"}),
    "tensor": ({"tensor": 2}, {}),
    "pipeline": ({"pipeline": 2}, {}),
    "data x tensor x pipeline": ({"data": 2, "tensor": 2, "pipeline": 2}, {}),
}


def mlp() -> Any:
    return digits(hidden=[24, 16, 16], validation_fraction=0.02)


def normalised() -> Any:
    return TinyTask(batch_norm=True)


def settings_of(layout: str, average: Mapping[str, Any] | None, **train: Any) -> Any:
    network, exchange = LAYOUTS[layout]
    return layout_settings(network, exchange, **{"steps": 6, "average": average, "validate_every_steps": 4, **train})


@cache
def torch_alone(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Train with torch alone; return the weights, their average, and the average's loss on the validation samples."""
    settings = settings_of("one", None)
    task = mlp()
    torch.manual_seed(settings.seed)
    model: nn.Module = task.build_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    add: Any = get_ema_multi_avg_fn(0.7) if kind == "ema" else get_swa_multi_avg_fn()
    average = AveragedModel(model, multi_avg_fn=add)
    stream = stream_of(task, settings)
    with stream("train", 0).epoch(0) as shares:
        for step, share in zip(range(1, 7), shares, strict=False):
            optimizer.zero_grad()
            for part in share.micro_batches:
                (loss_of(task, model, part.batch) * part.num_samples / share.batch_samples).backward()
            optimizer.step()
            if kind == "ema" or step in (3, 5):
                average.update_parameters(model)
    return (
        dict(model.state_dict()),
        dict(average.module.state_dict()),
        validated(task, average, stream("validation", 0)),
    )


def loss_at_the_end(run: LaidOut) -> float:
    return float((run.outcome.final["validation"] or {})["loss"])


def loss_of(task: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = task.loss(model(batch["inputs"].double()), batch)
    return found


def validated(task: Any, model: nn.Module, stream: SampleStream) -> float:
    model.eval()
    with torch.no_grad(), stream.epoch(0) as shares:
        parts = [part for share in shares for part in share.micro_batches]
        return sum(float(loss_of(task, model, part.batch)) * part.num_samples for part in parts) / stream.num_samples


@pytest.mark.parametrize(
    ("layout", "average"),
    [*((layout, EMA) for layout in LAYOUTS if layout != "one micro-batch"), ("one", SWA), ("zero1", SWA)],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_a_layout_validates_and_ends_with_the_average_that_torch_has(layout: str, average: dict[str, Any]) -> None:
    weights, expected, loss = torch_alone(average["type"])
    found = train_laid_out(mlp, settings_of(layout, average))
    assert furthest(found.weights, expected) <= TOLERANCE
    assert furthest(found.weights, weights) > 1e-4
    assert loss_at_the_end(found) == pytest.approx(loss, abs=TOLERANCE)


def test_training_goes_on_with_its_own_weights() -> None:
    plain = train_laid_out(mlp, settings_of("zero1", None))
    assert train_laid_out(mlp, settings_of("zero1", EMA)).losses == plain.losses


def test_before_the_average_begins_the_weights_are_validated_and_kept() -> None:
    plain = train_laid_out(mlp, settings_of("one", None))
    found = train_laid_out(mlp, settings_of("one", {"type": "swa", "from_epoch": 1}))
    assert same_bits(found.weights, plain.weights)
    assert found.outcome.final == plain.outcome.final


@pytest.mark.parametrize("layout", ["data of 2", "zero1", "pipeline"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, layout: str) -> None:
    whole = train_laid_out(mlp, settings_of(layout, SWA))

    def writer() -> CheckpointWriter:
        return CheckpointWriter(str(tmp_path), keep=1)

    train_laid_out(mlp, replace(settings_of(layout, SWA), pause_at=4), checkpoints=writer)
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    again = train_laid_out(mlp, settings_of(layout, SWA), load=lambda: Loaded(found))
    assert again.losses == whole.losses[4:]
    assert same_bits(again.weights, whole.weights)
    assert again.outcome.final == whole.outcome.final


def test_a_run_goes_on_under_another_layout_with_the_same_average(tmp_path: Path) -> None:
    _, expected, _ = torch_alone("ema")

    def writer() -> CheckpointWriter:
        return CheckpointWriter(str(tmp_path), keep=1)

    train_laid_out(mlp, replace(settings_of("tensor", EMA), pause_at=3), checkpoints=writer)
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    again = train_laid_out(mlp, settings_of("zero3", EMA), load=lambda: Loaded(found))
    assert furthest(again.weights, expected) <= TOLERANCE


def test_the_best_checkpoint_has_the_model_that_was_validated(tmp_path: Path) -> None:
    settings = replace(settings_of("zero2", EMA), best=Best("loss", "min"), checkpoint_storage=str(tmp_path))

    def writer() -> CheckpointWriter:
        return CheckpointWriter(str(tmp_path), keep=1)

    found = train_laid_out(mlp, settings, checkpoints=writer)
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.step == 6
    assert same_bits(dict(load_model(best).tensors), found.weights)


def train_normalised(layout: str, **train: Any) -> LaidOut:
    return train_laid_out(normalised, settings_of(layout, SWA, **train))


def measured(weights: Mapping[str, Tensor], layout: str = "one") -> dict[str, Tensor]:
    """Return the weights with running statistics that are the mean over the micro-batches of the full batches."""
    task = normalised()
    model = task.build_model().double()
    model.load_state_dict({**model.state_dict(), **weights})
    stream = stream_of(task, replace(settings_of(layout, SWA), layout=Layout()))("train", 0)
    with stream.epoch(0) as shares:
        full = [share for share in shares if share.batch_samples == stream.batch_size]
    measure_statistics(model, [part.batch["inputs"].double() for share in full for part in share.micro_batches])
    return dict(model.state_dict())


@pytest.mark.parametrize("layout", ["one", "data of 3", "zero3", "pipeline"])
def test_statistics_of_batch_normalisation_are_measured_for_the_mean_of_the_weights(layout: str) -> None:
    found = train_normalised(layout).weights
    assert any("running_var" in name for name in found)
    assert furthest(found, measured(found)) <= TOLERANCE


def test_statistics_of_a_task_without_validation_are_measured_for_the_model_that_is_kept() -> None:
    class Blind(TinyTask):
        def dataset(self, split: str) -> Any:
            return super().dataset(split) if split == "train" else None

    found = train_laid_out(lambda: Blind(batch_norm=True), settings_of("one", SWA)).weights
    assert furthest(found, measured(found)) <= TOLERANCE


def test_statistics_of_workers_that_normalise_alone_are_brought_together() -> None:
    found = train_normalised("one micro-batch", batch_norm="local").weights
    (mean,) = (name for name in found if "running_mean" in name)
    assert furthest({mean: found[mean]}, {mean: measured(found, "one micro-batch")[mean]}) <= TOLERANCE


def test_statistics_are_measured_on_batches_to_train_on_that_metrics_do_not_take() -> None:
    task = normalised()
    metrics = task.metrics
    task.to_training_batch = lambda columns, draws: {**task.to_batch(columns), "mixed": torch.ones(columns.num_rows)}

    def only_validated(outputs: Any, batch: Mapping[str, Tensor]) -> Any:
        assert "mixed" not in batch
        return metrics(outputs, batch)

    task.metrics = only_validated
    found = train_laid_out(lambda: task, settings_of("data of 3", SWA))
    assert furthest(found.weights, measured(found.weights)) <= TOLERANCE


def test_batches_too_small_to_measure_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.average: swa measures batch normalisation on batches of 8 samples"):
        train_laid_out(normalised, settings_of("data of 3", SWA, batch_size=8))


@pytest.mark.parametrize(
    ("network", "exchange", "reason"),
    [
        ({"data": 2}, {"type": "parameter_server"}, "parameter servers send the weights"),
        ({"data": 2}, {"type": "gossip"}, "with gossip each replica has weights of its own"),
        ({"data": 2}, {"type": "averaging", "every": 2}, "with averaging each replica"),
        ({"data": 2}, {"type": "elastic_averaging"}, "with elastic_averaging each replica"),
        ({"data": 2}, {"type": "independent"}, "with independent each replica"),
        ({"pipeline": 2, "schedule": "pipedream"}, {}, "pipedream's stages update at moments of their own"),
    ],
)
def test_an_average_that_is_not_of_one_model_is_refused(network: Any, exchange: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"train.average: {reason}.*take it out"):
        layout_settings(network, exchange, average=EMA)


def test_an_average_that_begins_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="from_step and from_epoch both say when the average begins"):
        layout_settings(average={"type": "swa", "from_step": 1, "from_epoch": 1})

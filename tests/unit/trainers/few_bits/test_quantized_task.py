"""Quantized networks in the training loop: the single process's result under any layout, and exact resumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, save_model
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.digits import Digits
from support.central_run import central_settings, train_central
from support.configs import GOOD
from support.few_bits import quantized_digits
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import digits, furthest, same_bits, stream_of

TOLERANCE = 1e-12
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({"data": 3}, {}),
    "zero1": ({"data": 2}, {"shard": "optimizer"}),
    "zero2": ({"data": 3}, {"shard": "gradients"}),
    "zero3": ({"data": 2}, {"shard": "parameters"}),
    "pipeline": ({"pipeline": 2}, {}),
    "interleaved": ({"pipeline": 2, "schedule": "interleaved_1f1b", "split": "equal"}, {}),
    "zero bubble": ({"pipeline": 2, "schedule": "zero_bubble"}, {}),
    "data x pipeline": ({"data": 2, "pipeline": 2}, {}),
}
KINDS: Mapping[str, dict[str, Any]] = {
    "bnn": {"type": "bnn"},
    "twn": {"type": "twn"},
    "dorefa": {"type": "dorefa", "weight_bits": 2, "ends": "quantized", "gradient_bits": None},
    "flexpoint": {"type": "flexpoint", "mantissa_bits": 8},
}
SGD = {"type": "sgd", "lr": 0.5, "momentum": 0.9}


@cache
def single(kind: str) -> LaidOut:
    return train_laid_out(quantized_digits(**KINDS[kind]), layout_settings(steps=6, optimizer=SGD))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("flexpoint", layout) for layout in LAYOUTS),  # which has a state of its own besides the weights
        *(("bnn", layout) for layout in ("data", "zero3", "zero bubble")),
        *(("twn", layout) for layout in ("zero1", "zero3", "pipeline")),
        *(("dorefa", layout) for layout in ("zero2", "interleaved", "data x pipeline")),
    ],
)
def test_a_layout_is_the_single_process(kind: str, layout: str) -> None:
    found = train_laid_out(quantized_digits(**KINDS[kind]), layout_settings(*LAYOUTS[layout], steps=6, optimizer=SGD))
    assert found.losses == pytest.approx(single(kind).losses, rel=0, abs=TOLERANCE)
    assert found.weights.keys() == single(kind).weights.keys()
    assert furthest(found.weights, single(kind).weights) <= TOLERANCE
    assert not [event for event in found.events if event["event"] == "warning"]


@pytest.mark.parametrize("kind", ["twn", "dorefa"])
def test_synchronous_servers_are_the_single_process(kind: str, tmp_path: Path) -> None:
    settings = central_settings(2, {"shards": 2}, steps=6, optimizer=SGD)
    found = train_central(quantized_digits(**KINDS[kind]), settings, tmp_path)
    assert found.losses == pytest.approx(single(kind).losses, rel=0, abs=TOLERANCE)
    assert furthest(found.weights, single(kind).weights) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "layout", "goes_on_as"),
    [
        *(("flexpoint", *pair) for pair in (("data", "data"), ("zero3", "pipeline"), ("pipeline", "zero3"))),
        *(("bnn", "pipeline", "zero3"), ("twn", "zero3", "pipeline"), ("dorefa", "data", "data")),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(
    kind: str, layout: str, goes_on_as: str, tmp_path: Path
) -> None:
    task = quantized_digits(**KINDS[kind])
    settings = layout_settings(*LAYOUTS[layout], steps=3, optimizer=SGD)
    train_laid_out(
        task, replace(settings, checkpoint_every_steps=100), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1)
    )
    found, _ = latest_good(tmp_path)
    assert found is not None
    settings = layout_settings(*LAYOUTS[goes_on_as], steps=6, optimizer=SGD)
    second = train_laid_out(task, settings, load=lambda: Loaded(found))
    assert second.losses == pytest.approx(single(kind).losses[3:], rel=0, abs=TOLERANCE)
    assert furthest(second.weights, single(kind).weights) <= TOLERANCE


def test_rounded_gradients_are_the_same_bits_after_a_resumption_and_with_activations_computed_again(
    tmp_path: Path,
) -> None:
    task = quantized_digits("dorefa", ends="quantized", gradient_bits="ternary")
    whole = train_laid_out(task, layout_settings(steps=4, optimizer=SGD))
    again = train_laid_out(task, layout_settings(steps=4, optimizer=SGD, recompute="sqrt"))
    assert same_bits(again.weights, whole.weights)
    settings = replace(layout_settings(steps=2, optimizer=SGD), checkpoint_every_steps=100)
    train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found, _ = latest_good(tmp_path)
    assert found is not None
    second = train_laid_out(task, layout_settings(steps=4, optimizer=SGD), load=lambda: Loaded(found))
    assert same_bits(second.weights, whole.weights)
    other = train_laid_out(task, layout_settings(steps=4, optimizer=SGD, seed=1))
    assert not same_bits(other.weights, whole.weights)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_are_rounded_in_a_pipeline_as_in_one_process(schedule: str) -> None:
    task = quantized_digits("dorefa", ends="quantized", gradient_bits=4)
    whole = train_laid_out(task, layout_settings(steps=3, optimizer=SGD))
    found = train_laid_out(task, layout_settings({"pipeline": 2, "schedule": schedule}, steps=3, optimizer=SGD))
    assert furthest(found.weights, whole.weights) <= TOLERANCE


@pytest.mark.parametrize("recompute", ["blocks", "sqrt"])
def test_flexpoint_predicts_the_same_with_activations_computed_again(recompute: str) -> None:
    found = train_laid_out(
        quantized_digits(**KINDS["flexpoint"]), layout_settings(steps=6, optimizer=SGD, recompute=recompute)
    )
    assert same_bits(found.weights, single("flexpoint").weights)


def test_real_weights_of_a_binarized_network_stay_within_one_where_they_would_leave_it() -> None:
    task = quantized_digits("bnn")
    settings = layout_settings(steps=5, optimizer={"type": "sgd", "lr": 20.0})
    found = train_laid_out(task, settings)
    largest = max(float(value.abs().max()) for name, value in found.weights.items() if name.endswith("original"))
    assert largest == 1.0
    assert max(float(value.abs().max()) for name, value in found.weights.items() if name.endswith("bias")) > 1.0


@pytest.mark.parametrize("buffers", ["broadcast", "error"])
def test_predictions_are_those_of_the_whole_batch_whatever_becomes_of_other_buffers(buffers: str) -> None:
    settings = layout_settings({"data": 3}, steps=6, optimizer=SGD, buffers=buffers)
    found = train_laid_out(quantized_digits(**KINDS["flexpoint"]), settings)
    assert furthest(found.weights, single("flexpoint").weights) <= TOLERANCE


def test_a_task_that_writes_its_weights_under_their_own_names_does_not_write_quantized_ones() -> None:
    class Writing(Digits):
        def export_files(self, tensors: object) -> dict[str, bytes]:
            return {}

    assert hasattr(Writing(), "export_files")
    task = quantized_digits("twn", task=Writing)()
    assert not hasattr(task, "export_files")
    assert task.class_names == Writing().class_names


def test_a_replica_without_samples_predicts_the_same_exponents() -> None:
    """Use 1437 samples in batches of 287, which leave 2 for the last one, of which a third replica has none."""
    task = quantized_digits("flexpoint", mantissa_bits=8, task=_all_digits)
    train = {"batch_size": 287, "steps": 7, "optimizer": SGD}
    one = train_laid_out(task, layout_settings({"microbatches": 1}, **train))
    three = train_laid_out(task, layout_settings({"microbatches": 1, "data": 3}, **train))
    assert furthest(three.weights, one.weights) <= TOLERANCE


def _all_digits() -> Any:
    return digits(hidden=[8, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_computes_with_is_made_of_the_parameters_that_are_trained(kind: str) -> None:
    """Compare a layer's weights in the trained model with a scheme of the same history on the saved ones."""
    task = quantized_digits(**KINDS[kind])()
    replica = Replica(task, settings := layout_settings(steps=1), stream_of(task, settings))
    model: Any = replica.model
    layer = next(module for module in model.modules() if hasattr(module, "parametrizations"))
    held = layer.parametrizations.weight
    assert any(parameter is held.original for parameter in model.parameters())
    assert torch.equal(layer.weight, held[0](held.original))


def test_a_run_read_back_answers_with_the_quantized_weights(tmp_path: Path) -> None:
    overrides = ["train.quantize={type: bnn}", "task.hidden=[16]"]
    config = load_train_config(GOOD, overrides)
    source = TaskSource.from_config(config.task, config.train)
    model: Any = tasks.build(source).build_model().eval()
    with RunDirectory.create(tmp_path, "run") as run:
        run.write_config(dump_yaml(config))
        save_model(run.paths.model, model_tensors(model), {"task": source.to_json()})
    found: Any = load_run(tmp_path / "run").load_model()
    inputs = torch.rand(5, 64)
    assert torch.equal(found(inputs), model(inputs))
    assert set(found[0].weight.unique().tolist()) == {-1.0, 1.0}
    (tmp_path / "run" / "model" / "model.json").unlink()  # of a run under way, whose config says it
    assert load_run(tmp_path / "run").task_source().quantize == {"type": "bnn", "ends": "quantized"}

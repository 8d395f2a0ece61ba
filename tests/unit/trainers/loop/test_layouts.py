"""Promise 2 for every layout: the loss of each step and the final weights are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.tasks import resolve
from support.layouts import LaidOut, held_elements, layout_settings, train_laid_out
from support.training import digits, furthest, same_bits

TOLERANCE = 1e-12

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({"data": 3}, {}),
    "zero1": ({"data": 2}, {"shard": "optimizer"}),
    "zero2": ({"data": 3}, {"shard": "gradients"}),
    "zero3": ({"data": 2}, {"shard": "parameters"}),
    "tensor": ({"tensor": 2}, {}),
    "tensor of 3": ({"tensor": 3}, {}),
    "pipeline of 3": ({"pipeline": 3, "schedule": "gpipe"}, {}),
    "named cuts": ({"pipeline": 2, "split": ["4"]}, {}),
    "data x tensor": ({"data": 2, "tensor": 2}, {}),
    "data x pipeline": ({"data": 2, "pipeline": 2}, {}),
    "tensor x pipeline": ({"tensor": 2, "pipeline": 2}, {}),
    "data x tensor x pipeline": ({"data": 2, "tensor": 2, "pipeline": 2}, {}),
    "zero1 x pipeline": ({"data": 2, "pipeline": 2}, {"shard": "optimizer"}),
    "zero3 x tensor": ({"data": 2, "tensor": 2}, {"shard": "parameters"}),
    "zero2 x tensor": ({"data": 2, "tensor": 2}, {"shard": "gradients"}),
}
SAVED_AND_LOADED = ["one", "data", "zero2", "zero3", "tensor", "pipeline", "data x tensor x pipeline"]
"""Layouts that are compared with one process while they save and load; "tensor" is there without dropout."""
PIPELINES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v")
FEW = {"validation_fraction": 0.02}
"""36 samples, in two batches of which the last is short: what is compared are steps, and one validation."""
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: digits(hidden=[24, 16, 16], dropout=0.3, **FEW),
    "cnn with batch normalisation": lambda: digits(model="cnn", hidden=[4, 6], **FEW),
    "transformer": lambda: resolve("python_source")(context=8, width=16, depth=2, heads=2, num_files=3, dropout=0.2),
}


def few_digits() -> Any:
    return digits(hidden=[24, 16, 16], **FEW)


def reference(task: Callable[[], Any], **train: Any) -> LaidOut:
    return train_laid_out(task, layout_settings(**train))


@cache
def clipped(optimizer: str) -> tuple[dict[str, Any], LaidOut]:
    """Return keys of `train`, and what one process comes to by them."""
    train = {"optimizer": {"type": optimizer, "lr": 0.01}, "grad_clip": 0.05, "steps": 2}  # a third of the norm
    return train, reference(few_digits, **train)


@cache
def three_steps_of(task: Callable[[], Any]) -> LaidOut:
    return reference(task)


@cache
def two_steps_of(model: str) -> LaidOut:
    """Train in one process, which is the reference of every schedule."""
    return reference(MODELS[model], steps=2)


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout == "tensor" or layout not in SAVED_AND_LOADED]
)
def test_a_layout_is_the_single_process(layout: str) -> None:
    network, exchange = LAYOUTS[layout]
    task = MODELS["mlp"] if network.get("data", 1) == 1 else few_digits
    one = three_steps_of(task)
    found = train_laid_out(task, layout_settings(network, exchange))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=TOLERANCE)
    assert furthest(found.weights, one.weights) <= TOLERANCE


@pytest.mark.parametrize("layout", ["data x tensor", "data x tensor x pipeline", "zero3 x tensor"])
def test_replicas_with_split_layers_normalise_a_batch_together(layout: str) -> None:
    network, exchange = LAYOUTS[layout]
    one = two_steps_of("cnn with batch normalisation")
    found = train_laid_out(MODELS["cnn with batch normalisation"], layout_settings(network, exchange, steps=2))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=TOLERANCE)
    assert furthest(found.weights, one.weights) <= TOLERANCE


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("model", ["cnn with batch normalisation", "transformer"])
def test_a_pipeline_is_bit_equal_to_one_process_with_the_same_micro_batches(model: str, schedule: str) -> None:
    one = two_steps_of(model)
    found = train_laid_out(MODELS[model], layout_settings({"pipeline": 2, "schedule": schedule}, steps=2))
    assert found.losses == one.losses
    assert same_bits(found.weights, one.weights)
    assert found.outcome.final == one.outcome.final


# Lars and lamb have norms over whole parameters, which a layout adds up, and hide how a gradient is scaled; adamw
# does not.
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("data x tensor x pipeline", "adamw"),
        ("zero3 x tensor", "adamw"),
        ("zero3 x tensor", "lars"),
        ("zero3 x tensor", "lamb"),
        ("zero1", "adamw"),
        ("zero1", "lars"),
    ],
)
def test_clipping_and_every_kind_of_optimizer_see_the_whole_gradient(layout: str, optimizer: str) -> None:
    network, exchange = LAYOUTS[layout]
    train, one = clipped(optimizer)
    found = train_laid_out(few_digits, layout_settings(network, exchange, **train))
    assert furthest(found.weights, one.weights) <= TOLERANCE


def test_a_short_last_batch_with_fewer_samples_than_micro_batches_is_exact() -> None:
    """Use 1437 samples in batches of 287, which leave 2 for the last one, of 7 micro-batches."""
    train = {"batch_size": 287, "steps": 6}
    one = train_laid_out(lambda: digits(hidden=[8, 8]), layout_settings({"microbatches": 7}, **train))
    for network in ({"pipeline": 2, "schedule": "zbv"}, {"data": 2, "pipeline": 2}):
        found = train_laid_out(lambda: digits(hidden=[8, 8]), layout_settings({"microbatches": 7, **network}, **train))
        assert furthest(found.weights, one.weights) <= TOLERANCE


def test_synchronized_batch_normalisation_spans_the_replicas_of_a_stage() -> None:
    task = MODELS["cnn with batch normalisation"]
    one = reference(task)
    found = train_laid_out(task, layout_settings({"data": 2, "pipeline": 2}))
    assert furthest(found.weights, one.weights) <= 1e-10


class Tied:
    """A language model whose head is its embedding; the pipeline's ends share a parameter."""

    def __init__(self) -> None:
        self._task = resolve("python_source")(context=8, width=16, depth=1, heads=2, num_files=3)

    def build_model(self) -> nn.Module:
        embedding = nn.Embedding(256, 16)
        head = nn.Linear(16, 256, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def test_tied_weights_at_both_ends_of_a_pipeline_stay_one_tensor() -> None:
    one = reference(Tied)
    found = train_laid_out(Tied, layout_settings({"pipeline": 2}))
    assert found.weights.keys() == one.weights.keys()
    assert "0.weight" in found.weights
    assert "4.weight" not in found.weights
    assert furthest(found.weights, one.weights) <= TOLERANCE


def test_recomputing_activations_changes_no_bit() -> None:
    def task() -> Any:  # without dropout: the backward pass draws in threads that share torch's generator
        return resolve("python_source")(context=8, width=16, depth=2, heads=2, num_files=3)

    plain = train_laid_out(task, layout_settings(steps=2))
    for network, recompute in (({}, "sqrt"), ({"pipeline": 2}, "blocks"), ({"pipeline": 2}, "sqrt")):
        again = train_laid_out(task, layout_settings(network, steps=2, recompute=recompute))
        assert again.losses == plain.losses
        assert same_bits(again.weights, plain.weights)


FORMS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **LAYOUTS,
    "one": ({}, {}),
    "pipeline": ({"pipeline": 2, "schedule": "interleaved_1f1b"}, {}),
}


def loaders(saved: str) -> list[str]:
    """Return the next layout and the plain one: each is saved, and loads what another has saved."""
    place = SAVED_AND_LOADED.index(saved)
    return list(dict.fromkeys([SAVED_AND_LOADED[(place + 1) % len(SAVED_AND_LOADED)], "one"]))


@cache
def four_steps() -> LaidOut:
    return reference(few_digits, steps=4, optimizer={"type": "adam", "lr": 0.01})


@pytest.mark.parametrize(
    ("saved", "loaded_by"),
    [
        *((saved, loaders(saved)) for saved in SAVED_AND_LOADED),
        *(
            pytest.param(saved, sorted(set(SAVED_AND_LOADED) - set(loaders(saved))), marks=pytest.mark.slow)
            for saved in SAVED_AND_LOADED
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_a_checkpoint_of_any_layout_goes_on_under_any_other(saved: str, loaded_by: list[str], tmp_path: Path) -> None:
    train: dict[str, Any] = {"optimizer": {"type": "adam", "lr": 0.01}}
    whole = four_steps()
    first = train_laid_out(
        few_digits,
        replace(layout_settings(*FORMS[saved], steps=2, **train), checkpoint_every_steps=100),
        checkpoints=lambda: CheckpointWriter(tmp_path, keep=1),
    )
    assert first.losses == pytest.approx(whole.losses[:2], rel=0, abs=TOLERANCE)
    found, _ = latest_good(tmp_path)
    assert found is not None
    assert found.step == 2
    for loaded in loaded_by:
        settings = layout_settings(*FORMS[loaded], steps=4, **train)
        second = train_laid_out(few_digits, settings, load=lambda: Loaded(found))
        assert second.losses == pytest.approx(whole.losses[2:], rel=0, abs=TOLERANCE)
        assert furthest(second.weights, whole.weights) <= TOLERANCE


@pytest.mark.parametrize("network", [{"pipeline": 2, "split": "equal"}, {"tensor": 2}], ids=["pipeline", "tensor"])
def test_a_worker_holds_its_part_of_the_weights_alone(network: dict[str, Any]) -> None:
    whole, parts = held_elements(lambda: digits(hidden=[64, 64, 64]), layout_settings(network))
    assert max(parts) < 0.65 * whole

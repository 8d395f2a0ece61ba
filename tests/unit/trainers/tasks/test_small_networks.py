"""Networks for the digits that differ in their convolutions: their weights, and how accurate they become."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from orchestray.platform.errors import TaskError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.subject import subject_of
from orchestray.trainers.tasks.small_networks import CONVOLUTIONS, SmallDigits
from support.layouts import train_laid_out
from support.training import settings_for

CONFIGS = Path(__file__).parents[4] / "configs" / "train"
PLAIN = 9 * (16 + 16 * 32 + 32 * 64) + 2 * (16 + 32 + 64) + 64 * 10 + 10
"""Weights of the network of plain convolutions, normalisation and the last layer included."""
BLOCKS = {
    "plain": 9 * (16 * 32 + 32 * 64),
    "fire": (16 * 8 + 8 + 2 * 16 + 16 * 8 * 10) + (32 * 16 + 16 + 2 * 32 + 32 * 16 * 10),
    "separable": (9 * 16 + 16 * 32) + (9 * 32 + 32 * 64),
    "tensor_train": (9 * 6 + 6 * 16 * 6 + 6 * 32) + (9 * 6 + 6 * 32 * 6 + 6 * 64),
}
"""Weights of the two convolutions after the first, by their formulas."""


@cache
def accuracy(kind: str) -> float:
    """Return the accuracy after five epochs of the real loop."""
    optimizer = {"type": "adamw", "lr": 0.02, "weight_decay": 0.01}
    schedule = {"type": "cosine", "warmup_steps": 40, "min_factor": 0.01}
    settings = settings_for(1, batch_size=64, epochs=5, precision="float32", optimizer=optimizer, lr_schedule=schedule)
    found = train_laid_out(lambda: SmallDigits(kind), settings)
    return float(found.outcome.final["validation"]["accuracy"])


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_each_has_the_weights_of_its_formula_as_analyse_counts_them(kind: str) -> None:
    counted = analyse(subject_of(str(CONFIGS / "digits-separable.yaml"), [f"task.kind={kind}"]))
    assert counted.parameters == PLAIN - BLOCKS["plain"] + BLOCKS[kind]


def test_one_by_one_convolutions_have_a_third_of_the_weights_at_three_points_of_accuracy(
    record_property: pytest.RecordProperty,
) -> None:
    assert BLOCKS["plain"] / BLOCKS["fire"] > 3
    assert accuracy("plain") > 0.97
    record_property("accuracy_delta", accuracy("fire") - accuracy("plain"))
    assert accuracy("fire") > accuracy("plain") - 0.03


def test_separable_convolutions_have_a_seventh_of_the_weights_at_three_points_of_accuracy(
    record_property: pytest.RecordProperty,
) -> None:
    assert BLOCKS["plain"] / BLOCKS["separable"] > 7
    record_property("accuracy_delta", accuracy("separable") - accuracy("plain"))
    assert accuracy("separable") > accuracy("plain") - 0.03


def test_reshaped_kernels_have_a_ninth_of_the_weights_at_three_points_of_accuracy(
    record_property: pytest.RecordProperty,
) -> None:
    assert BLOCKS["plain"] / BLOCKS["tensor_train"] > 9
    record_property("accuracy_delta", accuracy("tensor_train") - accuracy("plain"))
    assert accuracy("tensor_train") > accuracy("plain") - 0.03


@pytest.mark.parametrize("name", ["digits-squeezenet", "digits-separable", "digits-reshaped"])
def test_a_config_trains_each(name: str) -> None:
    task = load_train_config(CONFIGS / f"{name}.yaml").task
    model = SmallDigits(**task.arguments).build_model()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_an_unknown_kind_and_odd_channels_are_refused() -> None:
    with pytest.raises(TaskError, match=r"task\.kind must be one of plain, fire, separable, tensor_train, got 'thin'"):
        SmallDigits("thin")
    with pytest.raises(TaskError, match=r"task\.channels must be multiples of 8, got \[16, 20\]"):
        SmallDigits(channels=[16, 20])

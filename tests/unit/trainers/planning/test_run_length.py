"""The length of a run, and the mean batch of one whose batches grow."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.planning.run_length import RunLength, run_length

STEPS = {"type": "steps", "every_steps": 3, "factor": 2, "max_batch_size": 40}


def length_of(num_samples: int, **train: Any) -> RunLength:
    chosen = {"batch_size": 16, "optimizer": {"type": "sgd", "lr": 0.1}, **train}
    return run_length(load_train_config({"task": {"type": "digits"}, "train": chosen}).train, num_samples)


@pytest.mark.parametrize(
    ("train", "length"),
    [
        ({"epochs": 3}, RunLength(21, 7, 16)),
        ({"steps": 50}, RunLength(50, 7, 16)),
        ({"epochs": 3, "drop_last": True}, RunLength(18, 6, 16)),
    ],
)
def test_batches_of_one_size(train: dict[str, Any], length: RunLength) -> None:
    assert length_of(100, **train) == length


def test_batches_that_grow_count_with_the_samples_that_they_have() -> None:
    # 16 x 3, 32, 20; 32, 40, 28; 40, 40, 20: as in tests/unit/trainers/loop/test_growing_batches.py
    assert length_of(100, epochs=3, batch_schedule=STEPS) == RunLength(11, 4, 300 / 11)
    assert length_of(100, steps=6, batch_schedule=STEPS) == RunLength(6, 5, 132 / 6)


def test_batches_that_grow_at_a_time_unknown_count_as_not_growing() -> None:
    schedule = {"type": "variance", "theta": 0.5, "max_batch_size": 64}
    assert length_of(100, steps=50, accumulate=2, batch_schedule=schedule) == RunLength(50, 7, 16)

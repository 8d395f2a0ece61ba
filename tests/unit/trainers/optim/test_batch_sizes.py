"""Sizes of batches by the step and by what is measured; rates by the size."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.trainers.optim.batch_sizes import changes_by_step, measured_size, scaled_lr
from orchestray.trainers.optim.noise_scale import NoiseScale


def noise_of(trace: float, square: float) -> NoiseScale:
    return NoiseScale(0.9, {"trace": trace, "square": square, "weight": 1.0, "best_steps": 0.0, "best_samples": 0.0})


def schedule(kind: str, **keys: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "every_steps": 10,
        "max_batch_size": 1000,
        "factor": 1.0,
        "level": None,
        "theta": None,
        **keys,
    }


def test_steps_multiply_the_batch_up_to_its_maximum() -> None:
    by_steps = {"every_steps": 5, "every_epochs": None, "factor": 2, "max_batch_size": 50}
    assert changes_by_step(by_steps, 16, 100) == [(5, 32), (10, 50)]
    by_epochs = {"every_steps": None, "every_epochs": 2, "factor": 4, "max_batch_size": 160}
    assert changes_by_step(by_epochs, 10, 100) == [(20, 40), (26, 160)]
    assert changes_by_step({**by_epochs, "factor": 1}, 10, 100) == []


@pytest.mark.parametrize(
    ("chosen", "trace", "square", "wanted"),
    [
        (schedule("noise_scale"), 100.0, 1.0, 128),
        (schedule("noise_scale", factor=0.1), 100.0, 1.0, 16),
        (schedule("noise_scale", factor=20.0), 100.0, 1.0, 1000),  # the maximum
        (schedule("noise_scale"), 100.0, -1.0, 32),  # hidden by noise: once
        (schedule("noise_scale"), 1.0, 1.0, 16),  # never smaller
        (schedule("variance", level=0.5), 100.0, -1.0, 256),  # 100 / 256 < 0.5 < 100 / 128
        (schedule("variance", theta=0.5), 100.0, 1.0, 512),  # 100 / B <= 0.25 (1 + 100 / B): B >= 300
    ],
)
def test_the_batch_doubles_until_it_is_large_enough(
    chosen: dict[str, Any], trace: float, square: float, wanted: int
) -> None:
    assert measured_size(chosen, noise_of(trace, square), 16) == wanted


def test_rates_follow_the_batch_or_its_root() -> None:
    assert scaled_lr(None, 0.1, 512) == 0.1
    assert scaled_lr({"rule": "linear", "base_batch_size": 64}, 0.1, 512) == pytest.approx(0.8)
    assert scaled_lr({"rule": "sqrt", "base_batch_size": 64}, 0.1, 1024) == pytest.approx(0.4)

"""Group B: what lets a large batch learn as well as a small one. Means of several seeds on the built-in digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.tasks.digits import SIDE, Digits
from support.layouts import layout_settings, train_laid_out
from support.training import digits

STEEP = {"type": "sgd", "lr": 0.4, "momentum": 0.9}


def outcomes(seeds: Iterable[int], task: Callable[[], Any], **options: Any) -> list[Outcome]:
    """Return the outcome of a run of one process for each seed."""
    options = {"steps": None, **options, "precision": "float32", "validate_every_steps": 10_000}  # once, at the end
    settings = [layout_settings({"microbatches": 1}, seed=seed, **options) for seed in seeds]
    return [train_laid_out(task, each).outcome for each in settings]


def accuracies_of(found: Iterable[Outcome]) -> np.ndarray:
    return np.array([(each.final["validation"] or {})["accuracy"] for each in found])


def accuracies(hidden: list[int], *, num_seeds: int = 3, **options: Any) -> np.ndarray:
    """Return the validation accuracy at the end of the run, one for each seed."""
    return accuracies_of(outcomes(range(num_seeds), lambda: digits(hidden=hidden), **options))


def test_static_learning_rate_adjustment_recovers_the_small_batch_s_accuracy() -> None:
    def with_(batch_size: int, lr_scaling: dict[str, Any] | None = None) -> np.ndarray:
        optimizer = {"type": "sgd", "lr": 0.05}
        return accuracies([64], epochs=6, batch_size=batch_size, optimizer=optimizer, lr_scaling=lr_scaling)

    small, unscaled, scaled = with_(16), with_(128), with_(128, {"rule": "linear", "base_batch_size": 16})
    assert unscaled.mean() + 2 * unscaled.std(ddof=1) < small.mean() - 0.1
    # Eight times the batch with eight times the rate: most of what was lost is back, within 0.05 of the small batch.
    assert scaled.mean() > small.mean() - 0.05
    assert scaled.mean() - unscaled.mean() > 0.7 * (small.mean() - unscaled.mean())


def test_large_minibatches_keep_the_accuracy_with_scaled_and_warmed_up_rates_up_to_a_size() -> None:
    remedies = {
        "lr_scaling": {"rule": "linear", "base_batch_size": 16},
        "lr_schedule": {"type": "constant", "warmup_steps": 5},
    }

    def with_(batch_size: int, **more: Any) -> float:
        options = {"epochs": 8, "batch_size": batch_size, "optimizer": {"type": "sgd", "lr": 0.02}}
        return float(accuracies([64], num_seeds=2, **options, **more).mean())

    plain = {size: with_(size) for size in (16, 64, 256, 1024)}
    helped = {size: with_(size, **remedies) for size in (64, 256, 1024)}
    assert plain[16] > plain[64] + 0.1 > plain[256] + 0.3 > plain[1024] + 0.3
    assert min(helped[64], helped[256]) > plain[16] - 0.03
    # 64 times the batch is too much for these remedies: better than without, and worse than the small batch.
    assert plain[1024] + 0.1 < helped[1024] < plain[16] - 0.1


@pytest.mark.slow
def test_a_growing_minibatch_has_the_accuracy_of_a_decaying_rate_with_half_the_updates() -> None:
    def with_(**more: Any) -> tuple[np.ndarray, int]:
        found = outcomes(range(5), lambda: digits(hidden=[64]), epochs=12, batch_size=32, optimizer=STEEP, **more)
        return accuracies_of(found), found[0].step

    # Smith et al., 2018: what divides the rate multiplies the batch. A rate of 0.4 is too noisy to end with.
    constant, num_constant = with_()
    decayed, num_decayed = with_(lr_schedule={"type": "step", "every_steps": 4 * 45, "gamma": 0.25})
    grown, num_grown = with_(batch_schedule={"type": "steps", "every_epochs": 4, "factor": 4, "max_batch_size": 512})
    assert num_constant == num_decayed == 12 * 45
    assert num_grown <= 0.5 * num_decayed
    error = np.hypot(grown.std(ddof=1), decayed.std(ddof=1)) / np.sqrt(5)
    assert grown.mean() > decayed.mean() - max(2 * error, 0.01)
    assert min(grown.mean(), decayed.mean()) > constant.mean() + 0.01


def test_learning_rate_warmup_lets_a_large_batch_learn_at_a_rate_that_fails_without() -> None:
    def with_(warmup_steps: int) -> np.ndarray:
        return accuracies(
            [64, 64, 64],
            epochs=12,
            batch_size=256,
            optimizer={"type": "adam", "lr": 0.1},
            lr_schedule={"type": "constant", "warmup_steps": warmup_steps},
        )

    cold, warm = with_(0), with_(30)
    assert warm.mean() > 0.9
    assert warm.mean() - cold.mean() > 2 * np.hypot(cold.std(ddof=1), warm.std(ddof=1)) / np.sqrt(3)


class ShiftedDigits(Digits):
    """The digits with each image to learn from nine times, shifted by up to one pixel: 12,942, for batches of 4,096."""

    def dataset(self, split: str) -> pa.Table:
        table = super().dataset(split)
        if split != "train":
            return table
        images = table["image"].combine_chunks().flatten().to_numpy().reshape(-1, SIDE, SIDE)
        framed = np.pad(images, ((0, 0), (1, 1), (1, 1)))
        shifted = [framed[:, row : row + SIDE, column : column + SIDE] for row in range(3) for column in range(3)]
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(shifted).reshape(-1)), SIDE * SIDE)
        return pa.table({"image": pixels, "label": np.tile(table["label"].to_numpy(), 9)})


def test_lars_is_more_accurate_at_a_batch_of_4096_than_a_fixed_rate_when_each_is_the_best_of_five() -> None:
    def with_(optimizer: str, lr: float, *seeds: int) -> np.ndarray:
        chosen = {"type": optimizer, "lr": lr, "momentum": 0.9}
        found = outcomes(seeds, lambda: ShiftedDigits(hidden=[64, 64]), steps=24, batch_size=4096, optimizer=chosen)
        return accuracies_of(found)

    def tuned(optimizer: str, rates: list[float]) -> tuple[list[float], np.ndarray]:
        tried = [float(with_(optimizer, lr, 100).mean()) for lr in rates]
        return tried, with_(optimizer, rates[int(np.argmax(tried))], *range(3))

    tried, layer_wise = tuned("lars", [5.0, 10.0, 20.0, 40.0, 80.0])
    tried_fixed, fixed = tuned("sgd", [0.05, 0.1, 0.2, 0.4, 0.8])
    error = np.hypot(layer_wise.std(ddof=1), fixed.std(ddof=1)) / np.sqrt(3)
    assert layer_wise.mean() - fixed.mean() > max(2 * error, 0.1)
    # Three rates in a row, of which the last is four times the first, are each better than the best fixed one.
    assert min(tried[1:4]) > max(tried_fixed)

"""Group B: what lets a large batch learn as well as a small one. Means of several seeds on the built-in digits."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestray.trainers.core.outcome import Outcome
from support.layouts import layout_settings, train_laid_out
from support.training import digits

STEEP = {"type": "sgd", "lr": 0.4, "momentum": 0.9}


def outcomes(hidden: list[int], *, num_seeds: int = 5, **options: Any) -> list[Outcome]:
    """Return what a run of one process came to, one for each seed."""
    options = {"steps": None, **options, "precision": "float32", "validate_every_steps": 10_000}  # once, at the end
    settings = [layout_settings({"microbatches": 1}, seed=seed, **options) for seed in range(num_seeds)]
    return [train_laid_out(lambda: digits(hidden=hidden), each).outcome for each in settings]


def accuracies(hidden: list[int], **options: Any) -> np.ndarray:
    """Return the validation accuracy at the end of the run, one for each seed."""
    return np.array([(each.final["validation"] or {})["accuracy"] for each in outcomes(hidden, **options)])


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
        return float(accuracies([64], num_seeds=3, **options, **more).mean())

    plain = {size: with_(size) for size in (16, 64, 256, 1024)}
    helped = {size: with_(size, **remedies) for size in (64, 256, 1024)}
    assert plain[16] > plain[64] + 0.1 > plain[256] + 0.3 > plain[1024] + 0.3
    assert min(helped[64], helped[256]) > plain[16] - 0.03
    # 64 times the batch is too much for these remedies: better than without, and worse than the small batch.
    assert plain[1024] + 0.1 < helped[1024] < plain[16] - 0.1


def test_a_growing_minibatch_has_the_accuracy_of_a_decaying_rate_with_half_the_updates() -> None:
    def with_(**more: Any) -> tuple[np.ndarray, int]:
        runs = outcomes([64], epochs=12, batch_size=32, optimizer=STEEP, **more)
        return np.array([(run.final["validation"] or {})["accuracy"] for run in runs]), runs[0].step

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
    assert warm.mean() - cold.mean() > 2 * np.hypot(cold.std(ddof=1), warm.std(ddof=1)) / np.sqrt(5)


def test_lars_trains_large_batches_over_a_range_of_rates_where_sgd_fails() -> None:
    def at(optimizer: str, lr: float) -> float:
        chosen = {"type": optimizer, "lr": lr, "momentum": 0.9}
        return float(accuracies([64, 64], epochs=20, batch_size=1024, optimizer=chosen).mean())

    layer_wise = [at("lars", lr) for lr in (5.0, 40.0)]
    fixed = [at("sgd", lr) for lr in (0.1, 0.8)]
    assert max(layer_wise) > max(fixed)
    assert min(layer_wise) > 0.85
    assert min(fixed) < 0.6

"""Group B: what lets a large batch learn as well as a small one. Means of several seeds on the built-in digits."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.training import digits, train


def accuracies(hidden: list[int], *, num_seeds: int = 3, **options: Any) -> np.ndarray:
    """Return the validation accuracy at the end of the run, one for each seed."""
    options = {**options, "precision": "float32", "validate_every_steps": 10_000}  # once, at the end
    runs = (train(digits(hidden=hidden), seed=seed, **options)[0] for seed in range(num_seeds))
    return np.array([(run.outcome.final["validation"] or {})["accuracy"] for run in runs])


def test_static_learning_rate_adjustment_recovers_the_small_batch_s_accuracy() -> None:
    def with_(batch_size: int, lr: float) -> np.ndarray:
        return accuracies([64], epochs=6, batch_size=batch_size, optimizer={"type": "sgd", "lr": lr})

    small, unscaled, scaled = with_(16, 0.05), with_(128, 0.05), with_(128, 8 * 0.05)
    assert unscaled.mean() + 2 * unscaled.std(ddof=1) < small.mean() - 0.1
    # Eight times the batch with eight times the rate: most of what was lost is back, within 0.05 of the small batch.
    assert scaled.mean() > small.mean() - 0.05
    assert scaled.mean() - unscaled.mean() > 0.7 * (small.mean() - unscaled.mean())


def test_learning_rate_warmup_lets_a_large_batch_learn_at_a_rate_that_fails_without() -> None:
    def with_(warmup_steps: int) -> np.ndarray:
        return accuracies(
            [64, 64, 64],
            num_seeds=5,
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

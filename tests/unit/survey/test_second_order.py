"""Groups F and G: steps by curvature. Runs on the built-in digits, each side with the best of three rates.

K-FAC's damping and clip were chosen on the same task.
"""

from __future__ import annotations

from typing import Any

from orchestray.trainers.tasks import resolve
from support.layouts import LaidOut, layout_settings, train_laid_out

TARGET = 0.1
"""Training loss, a mean of 5 steps, that has to be reached."""
BATCH = 256


def trained(data: int = 1, *, steps: int, **optimizer: Any) -> LaidOut:
    settings = layout_settings(
        {"data": data, "microbatches": 1},
        optimizer=optimizer,
        steps=steps,
        batch_size=BATCH,
        precision="float32",
        validate_every_steps=10_000,
    )
    return train_laid_out(lambda: resolve("digits")(hidden=[64, 32]), settings)


def steps_to_target(losses: list[float]) -> int:
    means = (sum(losses[end - 5 : end]) / 5 for end in range(5, len(losses) + 1))
    return next((step for step, mean in enumerate(means, start=5) if mean <= TARGET), len(losses) + 1)


def test_kfac_needs_at_most_0_6_of_the_steps_of_sgd_at_the_same_large_batch() -> None:
    def best(rates: tuple[float, ...], **chosen: Any) -> int:
        return min(steps_to_target(trained(steps=120, lr=lr, momentum=0.9, **chosen).losses) for lr in rates)

    of_sgd = best((0.1, 0.2, 0.4), type="sgd")
    of_kfac = best((0.05, 0.1, 0.3), type="kfac", damping=0.01, kl_clip=0.01, inverse_every_steps=1)
    assert of_sgd <= 120
    assert of_kfac <= 0.6 * of_sgd

"""The estimator of the gradient noise scale, on normal gradients of known mean and covariance."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.optim.noise_scale import NoiseScale


def measured(sizes: list[int], *, num_batches: int = 4000, decay: float = 0.9999) -> NoiseScale:
    """Return what is measured of batches cut into parts of these sizes: |G|^2 = 9 + 16, S = 1 + 4 + 20 = 25 x 25."""
    rng, expected, deviations = np.random.default_rng(0), np.array([3.0, 4.0, 0.0]), np.array([3.0, 4.0, 24.5153])
    noise, total = NoiseScale(decay), sum(sizes)
    for _ in range(num_batches):
        parts = [expected + deviations / np.sqrt(size) * rng.normal(size=3) for size in sizes]
        fractions = [size / total for size in sizes]
        whole = sum(fraction * part for fraction, part in zip(fractions, parts, strict=True))
        squares = sum(fraction * float(part @ part) for fraction, part in zip(fractions, parts, strict=True))
        noise.add(squares, float(whole @ whole), len(sizes), total)
    return noise


@pytest.mark.parametrize("sizes", [[32, 32, 32, 32], [64, 64], [10, 50, 100]])
def test_variance_norm_and_noise_scale_are_those_of_the_distribution_for_parts_of_any_sizes(sizes: list[int]) -> None:
    noise = measured(sizes)
    assert noise.trace == pytest.approx(626.0, rel=0.05)
    assert noise.square == pytest.approx(25.0, rel=0.05)
    assert noise.scale == pytest.approx(25.04, rel=0.05)
    # The distribution does not change over the run, so the run's critical batch is its noise scale.
    assert noise.critical_batch == pytest.approx(25.04, rel=0.1)


def test_a_gradient_that_noise_hides_has_no_scale() -> None:
    noise = NoiseScale(0.5)
    noise.add(10.0, 1.0, 2, 4)  # the parts differ by more than the whole is long
    assert noise.square < 0
    assert noise.metrics(4).keys() == {"gradient_variance"}


def test_it_goes_on_from_its_state() -> None:
    whole, half = NoiseScale(0.9), NoiseScale(0.9)
    for step in range(10):
        whole.add(5.0 + step, 4.0, 3, 30)
        half = NoiseScale(0.9, half.state()) if step else half
        half.add(5.0 + step, 4.0, 3, 30)
    assert half.state() == whole.state()

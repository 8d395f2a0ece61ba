"""Random rounding is right on average, by four standard deviations, and varies no more than the papers say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.trainers.compression.half_precision import round_stochastically
from orchestray.trainers.compression.noise import random_bits, stochastic_floor_
from orchestray.trainers.compression.registry import make_compressor

STEPS = 500
NUM_VALUES = 200


def gradient(seed: int, num: int = NUM_VALUES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num, dtype=torch.float64, generator=generator) * 10.0 ** -(seed % 4)
    values[0] = 0.0
    return values


def sent(given: Tensor, seed: int, settings: dict[str, Any], num_steps: int = STEPS) -> Tensor:
    """Return what arrives of the same gradient in each of many steps, [steps, values]."""
    compressor = make_compressor(**settings, seed=seed)
    compressor.init([given])
    messages = (compressor.compress([given], step=step) for step in range(num_steps))
    return torch.stack([compressor.decompress(message)[0] for message in messages])


def test_rounding_reports_how_many_values_went_to_the_farther_neighbour_none_if_to_the_nearest() -> None:
    values, part = torch.tensor([1.0 + 2.0**-10] * 1_000, dtype=torch.float64), {}
    for rounding in ("nearest", "stochastic"):
        compressor = make_compressor("bfloat16", rounding=rounding, seed=0)
        compressor.init([values])
        assert compressor.run_report() == {}
        compressor.compress([values], step=1)
        part[rounding] = compressor.run_report()["farther"]
    assert part["nearest"] == 0.0
    assert abs(part["stochastic"] - 0.125) < 0.05  # an eighth of the way to 1 + 2 ** -7


def assert_right_on_average(found: Tensor, given: Tensor, one_step: Tensor | float) -> None:
    """Check that means are within four standard deviations of what was given, all but the 1 in 15,800 of chance.

    Args:
        found: [draws, values].
        one_step: the largest distance of the two values that one is rounded to, at least the standard deviation's
            double: what no value exceeds even where chance gives it few of its two values.
    """
    num = found.shape[0]
    mean, deviation = found.mean(0), found.std(0)
    rare = torch.as_tensor(one_step) * 10 / num  # so seldom rounded to the far side that no deviation is seen
    beyond = (mean - given).abs() > 4 * deviation / math.sqrt(num) + rare
    assert int(beyond.sum()) <= 1
    pooled = ((mean - given) / (deviation / math.sqrt(num)).clamp_(min=1e-300))[deviation > 0].mean()
    assert abs(float(pooled)) < 4 / math.sqrt(int((deviation > 0).sum()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        {"type": "qsgd"},
        {"type": "qsgd", "bits": 2, "bucket": 50},
        {"type": "qsgd", "bits": 3, "norm": "l2"},
        {"type": "qsgd", "bits": 8},
    ],
)
def test_qsgd_is_right_on_average_and_within_its_variance_bound(settings: dict[str, Any], seed: int) -> None:
    given = gradient(seed)
    found = sent(given, seed, settings)
    num_levels, bucket = 2 ** (settings.get("bits", 4) - 1) - 1, min(settings.get("bucket", 512), NUM_VALUES)
    assert_right_on_average(found, given, float(given.norm()) / num_levels)
    bound = min(bucket / num_levels**2, math.sqrt(bucket) / num_levels)  # lemma 3.1
    squares = (found - given).square().view(STEPS, -1, bucket).sum(2).mean(0)
    assert (squares <= bound * given.view(-1, bucket).square().sum(1)).all()


@pytest.mark.parametrize("seed", range(3))
def test_terngrad_is_right_on_average_and_varies_as_its_equations_say(seed: int) -> None:
    given = gradient(seed)
    found = sent(given, seed, {"type": "terngrad", "clip": None})
    scale = given.abs().max()
    assert set((found / scale).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert_right_on_average(found, given, float(scale))
    expected = scale * given.abs().sum() - given.square().sum()  # E||Q||^2 - ||g||^2
    squares = (found - given).square().sum(1)
    assert float(squares.mean()) == pytest.approx(float(expected), abs=4 * float(squares.std()) / math.sqrt(STEPS))


@pytest.mark.parametrize("seed", range(3))
def test_clipped_terngrad_is_right_on_average_for_what_clipping_leaves(seed: int) -> None:
    given = gradient(seed)
    limit = 1.5 * given.square().mean().sqrt()
    found = sent(given, seed, {"type": "terngrad", "clip": 1.5})
    assert (given.abs() > limit).any()
    assert_right_on_average(found, given.clamp(-limit, limit), float(limit))


def test_a_tensor_of_like_values_is_not_clipped_to_nothing() -> None:
    given = torch.tensor([1.0, 1.001, 0.999], dtype=torch.float64)
    found = sent(given, 0, {"type": "terngrad"}, num_steps=500)
    assert_right_on_average(found, given, 2.0)


VALUES = [1.0, 1.0 + 1e-4, -3.14159, 0.1, 2000.3, -65000.1, 6.1e-5, 5.9e-5, -1.0e-5, 3.3e-7, 2.0e-8, 1e-9, 0.0]


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_right_on_average_also_below_the_smallest_normal_number(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    num = 100_000
    for seed in range(2):
        given = torch.tensor(VALUES, dtype=source)
        drawn = torch.Generator().manual_seed(seed)
        found = round_stochastically(given.repeat(num).view(num, -1), dtype, drawn).double()
        for value, rounded in zip(given.double().tolist(), found.unbind(1), strict=True):
            kinds = rounded.unique()
            assert kinds.numel() <= 2
            low, high = float(kinds[0]), float(kinds[-1])
            assert low <= value <= high
            chance = 0.0 if low == high else (value - low) / (high - low)
            allowed = 4 * math.sqrt(max(chance * (1 - chance), 1 / num) / num) * max(high - low, 6e-8)
            assert float(rounded.mean()) == pytest.approx(value, rel=0, abs=allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_sixteen_bits_can_hold_is_not_rounded(dtype: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    held = bits.view(dtype)
    held = held[held.isfinite()]
    for source in (torch.float32, torch.float64):
        found = round_stochastically(held.to(source), dtype, torch.Generator().manual_seed(0))
        assert torch.equal(found.view(torch.int16), held.view(torch.int16))  # the sign of zero too


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_finite_values_beyond_the_range_are_sent_as_the_largest_and_infinite_ones_as_they_are(rounding: str) -> None:
    given = torch.tensor([1e6, -1e6, 65504.0, 65519.0, torch.inf, -torch.inf], dtype=torch.float64)
    found = sent(given, 0, {"type": "float16", "rounding": rounding}, num_steps=20)
    assert (found == torch.tensor([65504.0, -65504.0, 65504.0, 65504.0, torch.inf, -torch.inf])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_integer_is_its_own_floor_whatever_is_drawn(dtype: torch.dtype) -> None:
    integers = torch.arange(255, dtype=dtype)
    for seed in range(200):
        found = stochastic_floor_(integers.clone(), torch.Generator().manual_seed(seed))
        assert torch.equal(found, integers.to(torch.uint8))


def test_every_bit_that_is_drawn_is_set_half_the_time() -> None:
    num = 40_000
    for dtype in (torch.int16, torch.int32, torch.int64):
        drawn = random_bits(num, dtype, torch.Generator().manual_seed(3))
        assert drawn.numel() == num
        for bit in range(8 * dtype.itemsize):
            share = float(((drawn >> bit) & 1).double().mean())
            assert share == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(num))  # of 112 bits

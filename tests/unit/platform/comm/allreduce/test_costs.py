"""The alpha-beta model: its fit, the four formulas and the bounds, and the choice by them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from orchestray.platform.comm.allreduce.bounds import bandwidth_bound_s, latency_bound_s, no_redundancy_bound_s
from orchestray.platform.comm.allreduce.costs import (
    AlphaBeta,
    cheapest,
    cost_s,
    costs_s,
)
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, num_rounds, schedule

MODEL = AlphaBeta(alpha_s=50e-6, beta_s_per_byte=1e-9)


def test_a_fit_to_exact_times_gives_back_what_made_them() -> None:
    sizes = [1 << k for k in range(8, 24, 3)]
    fitted = AlphaBeta.fit(sizes, [MODEL.time_s(size) for size in sizes])
    assert fitted.alpha_s == pytest.approx(MODEL.alpha_s, rel=1e-9)
    assert fitted.beta_s_per_byte == pytest.approx(MODEL.beta_s_per_byte, rel=1e-9)


def test_a_fit_to_noisy_times_is_within_the_noise_for_small_messages_as_for_large_ones() -> None:
    sizes = [1 << k for k in range(6, 24)]
    for seed in range(20):
        noise = 1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, len(sizes))
        fitted = AlphaBeta.fit(sizes, [MODEL.time_s(size) * factor for size, factor in zip(sizes, noise, strict=True)])
        for size in (64, 1 << 23):
            assert fitted.time_s(size) == pytest.approx(MODEL.time_s(size), rel=0.1)


@pytest.mark.parametrize(("times_s", "expected"), [([3.0, 2.0, 1.0], "constant"), ([1e-9, 0.5, 1.0], "proportional")])
def test_a_fit_that_would_be_negative_stops_at_its_bound(times_s: list[float], expected: str) -> None:
    fitted = AlphaBeta.fit([1, 1000, 2000], times_s)
    assert fitted.alpha_s > 0
    assert fitted.beta_s_per_byte >= 0
    if expected == "constant":
        assert fitted.beta_s_per_byte == 0
        assert 1 < fitted.alpha_s < 3


@pytest.mark.parametrize("wrong", [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_a_fit_needs_two_sizes_and_times_above_zero(wrong: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="Two sizes or more are needed"):
        AlphaBeta.fit(*wrong)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "star"])
def test_a_cost_is_the_largest_message_of_every_round(algorithm: str) -> None:
    for size in range(1, 18):
        num_bytes = 16 * size * 720_720 // math.gcd(size, 720_720)  # every cut is even
        largest = [0] * num_rounds(algorithm, size)
        for rank in range(size):
            for step in schedule(algorithm, rank, size, num_bytes):
                if step.send is not None:
                    largest[step.round] = max(largest[step.round], step.send.num_elements)
        assert cost_s(algorithm, size, num_bytes, MODEL) == pytest.approx(sum(MODEL.time_s(n) for n in largest))


def test_an_unknown_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="There is no formula for 'hypercube'"):
        cost_s("hypercube", 4, 1.0, MODEL)


def test_no_cost_is_below_a_bound_and_butterfly_and_rabenseifner_meet_one_each() -> None:
    for size in (2, 4, 8, 16):
        for num_bytes in (0, 1, 1000, 10**6, 10**9):
            bounds = latency_bound_s(size, MODEL), bandwidth_bound_s(size, num_bytes, MODEL)
            for cost in costs_s(size, num_bytes, MODEL).values():
                assert cost >= max(bounds) * (1 - 1e-12)
        assert cost_s("butterfly", size, 0, MODEL) == pytest.approx(latency_bound_s(size, MODEL))
        gap = cost_s("rabenseifner", size, 1e6, MODEL) - no_redundancy_bound_s(size, 1e6, MODEL)
        assert gap == pytest.approx(latency_bound_s(size, MODEL)), "the bandwidth is the bound's, the latency twice it"


@pytest.mark.parametrize(
    ("size", "num_bytes", "expected"),
    [
        (2, 100, "butterfly"),
        (2, 10**8, "butterfly"),  # one message of n is as good as two of n/2
        (4, 100, "butterfly"),
        (4, 10**8, "rabenseifner"),
        (16, 10**4, "butterfly"),
        (16, 10**8, "rabenseifner"),
        (3, 100, "butterfly"),
        (3, 10**8, "ring"),  # Rabenseifner's would fold
        (5, 10**8, "ring"),
        (17, 10**8, "ring"),
        (1024, 10**9, "rabenseifner"),
        (1025, 100, "butterfly"),
    ],
)
def test_the_cheapest_by_the_formulas(size: int, num_bytes: int, expected: str) -> None:
    assert cheapest(costs_s(size, num_bytes, MODEL)) == expected


@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_the_choice_turns_from_butterfly_to_rabenseifner_where_the_algebra_says(size: int) -> None:
    levels = int(math.log2(size))
    crossover = levels * MODEL.alpha_s / (MODEL.beta_s_per_byte * (levels - 2 * (size - 1) / size))
    chosen = [cheapest(costs_s(size, factor * crossover, MODEL)) for factor in (0.01, 0.5, 0.999, 1.001, 2, 100)]
    assert chosen == ["butterfly"] * 3 + ["rabenseifner"] * 3


def test_a_larger_message_never_turns_the_choice_back() -> None:
    for size in range(2, 33):
        chosen = [cheapest(costs_s(size, 2**k, MODEL)) for k in range(4, 36)]
        assert len([True for a, b in pairwise(chosen) if a != b]) == len(set(chosen)) - 1


def test_what_is_measured_as_a_whole_competes() -> None:
    costs = costs_s(4, 1000, MODEL, {"native": AlphaBeta(1e-6, 1e-9)})
    assert cheapest(costs) == "native"
    assert cheapest(costs_s(4, 1000, MODEL, {"native": AlphaBeta(1.0, 1e-9)})) == "butterfly"

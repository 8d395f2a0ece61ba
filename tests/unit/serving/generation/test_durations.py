"""Durations in buckets."""

from __future__ import annotations

import pytest

from orchestray.serving.generation.durations import Durations


def test_buckets_are_cumulative_and_the_last_has_all() -> None:
    durations = Durations((0.1, 1.0))
    assert durations.mean_s == 0
    for seconds in (0.05, 0.1, 0.5, 3.0):
        durations.add(seconds)
    assert durations.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert (durations.num, durations.sum_s) == (4, pytest.approx(3.65))

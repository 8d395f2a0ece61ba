"""Times between and beyond the measured sizes and numbers of ranks, against closed forms."""

from __future__ import annotations

import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.errors import ConfigError
from orchestray.trainers.machine.transfers import KINDS, CollectiveTimes, Curve, Kind, ring_s
from support.profiles import LINK, SIZES_BYTES, line, profile


def test_measured_sizes_get_their_measured_times_and_power_laws_hold_between_them() -> None:
    curve = Curve((1000, 100_000, 1_000_000), (1e-4, 1e-3, 5e-3))
    for size, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
        assert curve.seconds(size) == pytest.approx(time_s)
    assert curve.seconds(10_000) == pytest.approx((1e-4 * 1e-3) ** 0.5)


@pytest.mark.parametrize("num_bytes", [0, 1, 500, 1 << 26, 1 << 32])
def test_beyond_the_measured_sizes_a_link_keeps_its_latency_and_its_bandwidth(num_bytes: int) -> None:
    assert line(LINK).seconds(num_bytes) == pytest.approx(LINK.time_s(num_bytes))


def test_a_curve_has_no_jump_where_the_fit_takes_over() -> None:
    curve = Curve((1000, 10_000, 100_000), (3e-4, 2e-4, 9e-4))
    for end in (1000, 100_000):
        assert curve.seconds(end * 1.0001) == pytest.approx(curve.seconds(end * 0.9999), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 100])
def test_other_numbers_of_ranks_follow_the_formulas_of_rings_and_trees(kind: Kind, ranks: int) -> None:
    found = profile().seconds(kind, ranks, 1 << 20)
    assert found == pytest.approx(ring_s(kind, ranks, 1 << 20, LINK))


def test_one_rank_sends_nothing() -> None:
    assert profile().seconds("all_reduce", 1, 1 << 20) == 0.0


def test_a_machine_slower_than_its_formulas_is_as_much_slower_with_other_numbers_of_ranks() -> None:
    slow = {
        kind: {2: Curve(SIZES_BYTES, tuple(3 * ring_s(kind, 2, size, LINK) for size in SIZES_BYTES))} for kind in KINDS
    } | {"exchange": {2: line(LINK)}}
    times = CollectiveTimes(slow)
    assert times.seconds("all_gather", 6, 1 << 20) == pytest.approx(3 * ring_s("all_gather", 6, 1 << 20, LINK))


def test_rings_and_trees_take_what_their_papers_say() -> None:
    link = AlphaBeta(1.0, 0.5)
    assert ring_s("all_reduce", 4, 8, link) == 2 * 3 * (1 + 0.5 * 2)
    assert ring_s("reduce_scatter", 4, 8, link) == ring_s("all_gather", 4, 8, link) == 3 * (1 + 0.5 * 2)
    assert ring_s("broadcast", 5, 8, link) == 3 * (1 + 0.5 * 8)
    assert ring_s("exchange", 5, 8, link) == 1 + 0.5 * 8


def test_times_survive_json_and_what_is_missing_or_wrong_is_refused() -> None:
    data = profile().collectives.to_json()
    assert CollectiveTimes.from_json(data).to_json() == data
    del data["broadcast"]["2"]
    with pytest.raises(ConfigError, match="broadcast with 2 ranks"):
        CollectiveTimes.from_json(data)
    for sizes, times_s in (((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0, 0.0)), ((1, 2), (1.0,))):
        with pytest.raises(ConfigError, match="transfer"):
            Curve(sizes, times_s)

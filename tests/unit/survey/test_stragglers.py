"""Group D: what a worker that takes ten times as long costs, and what keeps it from costing more.

The real coordinator hands out the shares; workers only take their (virtual) time, drawn from several seeds.
"""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

import pytest

from support.ledger_time import SLOW, Simulation, straggler

SEEDS = range(5)
ONCE = Counter({(epoch, position): 1 for epoch in range(4) for position in range(120)})
"""Every sample of the simulated runs."""


def seconds(num_workers: int, **options: Any) -> float:
    return mean(Simulation(straggler(seed), num_workers, **options).run().now_s for seed in SEEDS)


def test_straggler_handling_orders_the_schemes_by_what_a_ten_times_slower_worker_costs() -> None:
    synchronous = seconds(4)
    stale = seconds(4, consistency="stale", staleness=3)
    asynchronous = seconds(4, consistency="asynchronous")
    backup = seconds(4, backup_workers=1)
    # 40 steps of the slow worker's time, each uniform in 5 to 15 s: 4 sigma of the mean of 5 runs is 8 %.
    # A worker that is always slow holds up a stale run as well: each worker has one share of every batch to do.
    assert synchronous == pytest.approx(40 * SLOW, rel=0.08)
    assert stale == pytest.approx(40 * SLOW, rel=0.08)
    assert asynchronous < 0.5 * synchronous
    assert asynchronous == pytest.approx(160 / (3 + 1 / SLOW), rel=0.15)  # shares over what all do in a second
    assert backup < 0.3 * synchronous


def test_shares_by_speed_make_stale_and_synchronous_runs_with_a_straggler_as_fast_as_asynchronous_ones() -> None:
    work: dict[str, Any] = {"num_samples": 480, "batch_size": 48}
    even = seconds(4, **work)
    asynchronous = seconds(4, consistency="asynchronous", **work)
    stale = seconds(4, consistency="stale", staleness=4, balance="speed", **work)
    synchronous = seconds(4, balance="speed", **work)
    assert stale < 0.5 * even
    assert stale == pytest.approx(asynchronous, rel=0.2)
    # The shares of a synchronous step are as even as the speeds are known, which times within 50 % of their mean blur.
    assert synchronous < 0.5 * even


def test_backup_workers_hide_a_straggler_and_every_sample_counts_once() -> None:
    for seed in SEEDS:
        plain = Simulation(straggler(seed), 3).run()
        redundant = Simulation(straggler(seed), 4, backup_workers=1).run()
        assert redundant.now_s < 0.4 * plain.now_s
        assert plain.applied == redundant.applied == ONCE
        assert set(redundant.staleness) == {0}
        assert 0 < redundant.coordinator.progress.dropped_copies <= redundant.copies
        assert plain.copies == 0

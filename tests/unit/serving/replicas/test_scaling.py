"""The number of replicas follows the load, within bounds, without flapping."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.batching_theory import greedy_chain
from orchestray.platform.cluster import key_values
from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Batcher, DeadlineError
from orchestray.serving.replicas.autoscaler import REPORT_EVERY_S, LoadMeter, keep_reporting, report_load
from orchestray.serving.replicas.scaling import Load, ScalingGoal, mean_latency_s, wanted_replicas
from support.patience import PATIENCE_S

QUIET = Load(rate_per_s=0.0, num_queued=0, a_s=0.020, c_s=0.0005, max_batch_size=32)
GOAL = ScalingGoal(least=1, most=8, target_latency_s=0.05)

loads = st.builds(
    Load,
    rate_per_s=st.floats(0, 5000),
    num_queued=st.integers(0, 2000),
    a_s=st.floats(0, 0.5),
    c_s=st.floats(0, 0.05),
    max_batch_size=st.integers(1, 128),
    idle_s=st.floats(0, 100),
)


@pytest.mark.parametrize("rate_per_s", [1, 10, 30, 90, 267, 533])
def test_the_latency_that_is_planned_with_bounds_the_exact_one(rate_per_s: float) -> None:
    exact_s, _ = greedy_chain(rate_per_s, 0.020, 0.0005, 32)
    assert 0.999 * exact_s <= mean_latency_s(rate_per_s, 0.020, 0.0005, 32) <= 1.15 * exact_s


def test_above_capacity_no_latency_is_planned_with() -> None:
    assert mean_latency_s(900, 0.020, 0.0005, 32) == math.inf


@given(loads, st.integers(0, 8), st.integers(0, 3), st.integers(3, 8))
def test_the_number_is_within_its_bounds_and_zero_only_where_that_is_allowed(
    load: Load, num_replicas: int, least: int, most: int
) -> None:
    wanted = wanted_replicas(load, num_replicas, replace(GOAL, least=least, most=most))
    assert least <= wanted <= most


@given(st.floats(1, 4000), st.floats(1, 4000), st.integers(1, 8))
def test_more_requests_never_need_fewer_replicas(one_per_s: float, other_per_s: float, num_replicas: int) -> None:
    low, high = sorted((one_per_s, other_per_s))
    counts = [wanted_replicas(replace(QUIET, rate_per_s=rate), num_replicas, GOAL) for rate in (low, high)]
    assert counts[0] <= counts[1]


@given(loads, st.integers(1, 8))
def test_a_steady_load_settles(load: Load, num_replicas: int) -> None:
    settled = wanted_replicas(load, num_replicas, GOAL)
    assert wanted_replicas(load, settled, GOAL) == settled


def test_a_small_change_of_the_rate_does_not_take_a_replica_away_and_bring_it_back() -> None:
    counts = [1]
    for step in range(200):
        rate = 1500 * (1 + 0.05 * (-1) ** step)
        counts.append(wanted_replicas(replace(QUIET, rate_per_s=rate), counts[-1], GOAL))
    assert len(set(counts[2:])) == 1


def test_a_backlog_brings_replicas_even_if_nothing_more_comes() -> None:
    assert wanted_replicas(replace(QUIET, num_queued=1000), 1, GOAL) > 4


def test_the_last_replica_goes_after_silence_and_comes_with_the_first_request() -> None:
    goal = replace(GOAL, least=0, idle_before_zero_s=30.0)
    assert wanted_replicas(replace(QUIET, idle_s=29.0), 1, goal) == 1
    assert wanted_replicas(replace(QUIET, idle_s=30.0), 1, goal) == 0
    assert wanted_replicas(replace(QUIET, idle_s=3600.0), 0, goal) == 0
    assert wanted_replicas(replace(QUIET, num_queued=1, idle_s=3600.0), 0, goal) == 1
    assert wanted_replicas(replace(QUIET, idle_s=3600.0), 2, GOAL) == 1


def test_a_target_that_no_number_meets_is_served_by_as_many_as_the_capacity_needs() -> None:
    goal = replace(GOAL, target_latency_s=0.001)
    assert wanted_replicas(replace(QUIET, rate_per_s=5.0), 1, goal) == 1


def test_a_first_replica_is_awaited_however_long_it_takes_and_then_has_the_whole_quiet_time() -> None:
    goal = replace(GOAL, least=0)
    starting = replace(QUIET, idle_s=2 * goal.idle_before_zero_s, has_runner=False)
    assert wanted_replicas(starting, 1, goal) == 1
    assert wanted_replicas(replace(starting, idle_s=3600.0), 1, goal) == 0  # it never came
    assert wanted_replicas(replace(starting, has_runner=True), 1, goal) == 0

    async def main() -> list[Load]:
        batcher: Batcher[int, int] = Batcher()
        meter = LoadMeter(batcher, 0.0)
        await asyncio.sleep(60)
        found = [meter.measure(60.0)]
        batcher.add_runner(lambda items: asyncio.sleep(0, items))
        found += [meter.measure(61.0), meter.measure(71.0)]
        await batcher.close()
        return found

    assert [(load.has_runner, load.idle_s) for load in event_loop.run(main())] == [
        (False, 60.0),
        (True, 0.0),
        (True, 10.0),
    ]


def test_a_request_that_is_refused_for_the_time_a_start_takes_is_demand_for_one() -> None:
    async def main() -> Load:
        batcher: Batcher[int, int] = Batcher()
        batcher.expect_start(8.0)
        meter = LoadMeter(batcher, 0.0)
        await asyncio.sleep(100)
        assert wanted_replicas(meter.measure(100.0), 0, replace(GOAL, least=0)) == 0
        with pytest.raises(DeadlineError):
            await batcher.submit(1, deadline_s=101.0)
        return meter.measure(100.5)

    assert wanted_replicas(event_loop.run(main()), 0, replace(GOAL, least=0)) == 1


def test_a_load_that_could_not_be_told_is_told_again() -> None:
    async def main() -> list[dict[str, Any]]:
        batcher: Batcher[int, int] = Batcher()
        told: list[dict[str, Any]] = []
        outcomes = iter([None, OSError("no store"), RuntimeError("still none"), None])

        async def write(load: dict[str, Any]) -> None:
            error = next(outcomes, None)
            if error is not None:
                raise error
            told.append(load)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_reporting(batcher, write), 4.5 * REPORT_EVERY_S)
        return told

    assert len(event_loop.run(main())) == 3


def test_a_head_that_does_not_answer_keeps_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_in: dict[str, threading.Thread] = {}
    told = threading.Event()

    def put(key: str, value: object) -> None:
        asked_in["put"] = threading.current_thread()
        told.set()

    def delete(key: str) -> None:
        asked_in["del"] = threading.current_thread()

    monkeypatch.setattr(key_values, "put", put)
    monkeypatch.setattr(key_values, "delete", delete)

    async def main() -> None:
        reporting = asyncio.create_task(report_load(Batcher(), "key"))
        assert await asyncio.to_thread(told.wait, PATIENCE_S)
        reporting.cancel()
        await asyncio.wait({reporting})

    asyncio.run(main())
    assert sorted(asked_in) == ["del", "put"]
    assert threading.current_thread() not in asked_in.values()  # that of the loop

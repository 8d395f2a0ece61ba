"""Knowledge of the adaptive wait: service times, patterns of arrival, and when a wait pays."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from lab.batching_simulation import Service, Simulation, Trace, simulate
from orchestray.loadtest.arrivals import bursts, poisson
from orchestray.serving.batching import Adaptive, Fixed, Greedy
from orchestray.serving.batching.policies.adaptive import ArrivalPattern, remaining
from orchestray.serving.batching.policies.service_time import ServiceTimeModel

SERVICE = Service(0.020, 0.0005)


def closed(policy: Adaptive | Greedy | Fixed, num_clients: int, objective: str = "mean") -> Trace:
    rng = random.Random(1)
    return simulate(
        policy,
        SERVICE,
        lambda run: run.closed_loop(num_clients, lambda: 0.0005 + rng.expovariate(2000.0), 4.0),
        warm_up_s=1.0,
        objective=objective,
    )


def test_the_line_of_service_times_is_found_from_varied_batches() -> None:
    model, rng = ServiceTimeModel(32), random.Random(0)
    for _ in range(100):
        size = rng.randint(1, 32)
        model.observe(size, 0.020 + 0.0005 * size)
    assert model.a_s == pytest.approx(0.020, rel=0.01)
    assert model.c_s == pytest.approx(0.0005, rel=0.02)


def test_batches_of_one_size_keep_the_split_and_follow_the_sum() -> None:
    """Keep the last answer by the ridge: a plain least-squares fit has none here."""
    model, rng = ServiceTimeModel(32), random.Random(0)
    for _ in range(100):
        size = rng.randint(1, 32)
        model.observe(size, 0.020 + 0.0005 * size)
    for _ in range(500):
        model.observe(8, 0.024)
    assert model.predict_s(8) == pytest.approx(0.024, rel=1e-3)
    assert model.a_s == pytest.approx(0.020, rel=0.1)


def test_a_staircase_of_padded_batches_is_predicted_at_the_sizes_seen() -> None:
    service, model, rng = Service(0.005, 0.001, sizes=(1, 4, 16, 32)), ServiceTimeModel(32), random.Random(0)
    for _ in range(600):
        size = rng.randint(1, 32)
        model.observe(size, service.seconds(size))
    errors = [abs(model.predict_s(size) / service.seconds(size) - 1) for size in range(1, 33)]
    line = [abs((model.a_s + model.c_s * size) / service.seconds(size) - 1) for size in range(1, 33)]
    assert statistics.fmean(errors) < 0.05
    assert max(errors) < 0.2
    assert statistics.fmean(errors) < 0.5 * statistics.fmean(line)


def test_one_pause_of_the_machine_is_no_new_model_and_a_lasting_change_is() -> None:
    model = ServiceTimeModel(8)
    for _ in range(50):
        model.observe(4, 0.010)
    model.observe(4, 5.0)
    assert model.predict_s(4) < 0.025
    for _ in range(60):
        model.observe(4, 0.040)
    assert model.predict_s(4) == pytest.approx(0.040, rel=0.1)


@pytest.mark.parametrize(
    ("variance", "count", "expected"),
    [(0.0, 3, 7.0), (0.0, 10, 0.0), (10.0, 3, 5.0), (10.0, 9, 5.0)],
)
def test_what_is_still_to_come_depends_on_what_came_unless_arrivals_are_memoryless(
    variance: float, count: int, expected: float
) -> None:
    assert remaining(10.0, variance, 0.5, count) == pytest.approx(expected)


def test_bursts_promise_more_the_more_came() -> None:
    assert remaining(10.0, 40.0, 0.5, 9) > remaining(10.0, 40.0, 0.5, 5) > remaining(10.0, 40.0, 0.5, 1)


def test_a_pattern_tells_clients_that_return_from_independent_ones() -> None:
    rng = random.Random(0)
    returning, independent = ArrivalPattern(), ArrivalPattern()
    for _ in range(200):
        size = rng.randint(1, 16)
        returning.close(size, size)
        independent.close(size, sum(rng.random() < 0.05 for _ in range(100)))
    assert returning.expected(12) == pytest.approx(12, abs=0.1)
    assert returning.regularity > 0.95
    assert independent.beta < 0.2
    assert independent.regularity < 0.3


@pytest.mark.parametrize("num_clients", [2, 8, 32])
def test_clients_that_come_back_together_share_batches(num_clients: int) -> None:
    """Compare with greedy batches, which split them, 1 and N - 1 in turn.

    Each then waits for two batches, 2 a + c N; together, a + c N + delay.
    """
    greedy, adaptive = closed(Greedy(), num_clients), closed(Adaptive(), num_clients)
    assert statistics.fmean(adaptive.batch_sizes) > 0.95 * num_clients
    assert adaptive.mean_s < SERVICE.seconds(num_clients) + 0.003
    assert greedy.mean_s > 1.1 * adaptive.mean_s


def test_the_wait_is_found_without_being_told_and_beats_one_timeout_for_all() -> None:
    for num_clients in (4, 16):
        best_s = min(closed(Fixed(timeout_ms), num_clients).mean_s for timeout_ms in (0, 2, 5, 10))
        assert closed(Adaptive(), num_clients).mean_s < 1.05 * best_s


def test_changes_of_the_load_are_followed_within_seconds() -> None:
    """Send independent clients, then 16 that return together, then independent ones again, each for 5 s.

    From 2 s after each change on the mean is within 10 % of that of the best fixed timeout of that load.
    """
    each_s, settle_s, seeds = 5.0, 2.0, (1, 2, 3)

    def means_s(make: Callable[[], Adaptive | Fixed]) -> list[float]:
        """Return the mean of each load, over the seeds; arrivals are the same for every policy."""
        found = []
        for seed in seeds:
            before, clients, after = (random.Random(f"{seed} {index}") for index in range(3))

            async def drive(run: Simulation, before=before, clients=clients, after=after) -> None:  # type: ignore[no-untyped-def]
                await run.open_loop(poisson(50.0, before), each_s)
                await run.closed_loop(16, lambda: 0.0005 + clients.expovariate(2000.0), 2 * each_s)
                await run.open_loop(poisson(50.0, after), 3 * each_s)

            trace = simulate(make(), SERVICE, drive)
            spans = [trace.between(index * each_s + settle_s, (index + 1) * each_s) for index in range(3)]
            found.append([statistics.fmean(span) for span in spans])
        return [statistics.fmean(of_seeds) for of_seeds in zip(*found, strict=True)]

    fixed = [means_s(lambda timeout_ms=timeout_ms: Fixed(timeout_ms)) for timeout_ms in (0, 2, 5, 10)]  # type: ignore[misc]
    best = [min(of_load) for of_load in zip(*fixed, strict=True)]
    assert best[1] < 0.75 * fixed[0][1], "who never waits is slow for the clients that return"
    for index, (ours_s, best_s) in enumerate(zip(means_s(Adaptive), best, strict=True)):
        assert ours_s < 1.1 * best_s, f"load {index}: {ours_s * 1e3:.1f} ms against {best_s * 1e3:.1f} ms"


def test_objectives_trade_the_mean_for_the_tail_and_for_throughput() -> None:
    def burst(objective: str) -> Trace:
        return simulate(
            Adaptive(),
            SERVICE,
            lambda run: run.open_loop(bursts(89.0, 8, 0.002, random.Random(3)), 12.0),
            objective=objective,
        )

    mean, throughput = burst("mean"), burst("throughput")
    assert statistics.fmean(throughput.batch_sizes) > 1.1 * statistics.fmean(mean.batch_sizes)
    assert mean.mean_s < throughput.mean_s
    tail = closed(Adaptive(), 32, "tail")
    assert tail.quantile_s(0.99) < 1.1 * tail.mean_s


def test_goodput_stays_near_capacity_when_four_times_as_much_is_asked_and_hardly_an_answer_is_late() -> None:
    capacity_per_s, seconds, warm_up_s = 32 / 0.036, 8.0, 1.0
    for load in (1.2, 2.0, 4.0):
        trace = simulate(
            Adaptive(),
            SERVICE,
            lambda run, load=load: run.open_loop(poisson(load * capacity_per_s, random.Random(1)), seconds),
            warm_up_s=warm_up_s,
            allow_s=0.1,
        )
        goodput_per_s = len(trace.between(warm_up_s, seconds)) / (seconds - warm_up_s)
        assert goodput_per_s >= 0.97 * capacity_per_s
        assert trace.num_late < 0.005 * trace.num_offered
        assert max(trace.latencies_s) <= 0.1 + 1e-9


def test_the_horizon_follows_a_model_that_became_faster_under_steady_load() -> None:
    """Overlap windows of the slow model's horizon under load: none is ever over before the next is opened."""
    policy, model = Adaptive(), ServiceTimeModel(32)
    policy.bind(max_batch_size=32, objective="mean", model=model)
    now_s = 0.0
    for seconds in [0.5] * 20 + [0.001] * 400:
        policy.arrived(now_s)
        now_s += seconds
        model.observe(1, seconds)
        policy.finished(now_s, 1)
    assert len(policy._windows) <= 8
    assert policy.horizon_s < 0.01

"""The coordinator: every sample once whatever happens, no worker too far ahead, barriers with everything applied."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestray.trainers.ps.protocol.assignments import Compute, DoneStep, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from support.ledger_traces import Trace, loss_of
from support.ledgers import compute, coordinator, done, settings
from support.seeds import a_few_and

CONSISTENCIES: list[dict[str, Any]] = [
    {"consistency": "synchronous"},
    {"consistency": "stale", "staleness": 0},
    {"consistency": "stale", "staleness": 2},
    {"consistency": "asynchronous"},
    {"consistency": "asynchronous", "lookahead": 2},
]


BY_SPEED: list[dict[str, Any]] = [
    {**one, "balance": "speed", "backup_workers": 0} for one in CONSISTENCIES if one["consistency"] != "asynchronous"
]


def drawn(seed: int, consistencies: list[dict[str, Any]] = CONSISTENCIES) -> tuple[CoordinatorSettings, random.Random]:
    """Draw the settings of a small run at random."""
    rng = random.Random(seed)
    consistency = rng.choice(consistencies)
    chosen = settings(
        num_samples=rng.randint(1, 40),
        batch_size=rng.randint(1, 20),
        num_shares=rng.randint(1, 5),
        accumulate=rng.randint(1, 3),
        epochs=rng.randint(1, 3),
        **{
            "backup_workers": rng.choice([0, 0, 1, 2]),
            "validate_every_steps": rng.choice([None, None, 3]),
            "checkpoint_every_steps": rng.choice([None, 2, 5]),
            "num_validation_samples": rng.randint(1, 9),
            **consistency,
        },
    )
    return chosen, rng


# -- whatever happens --------------------------------------------------------------------------------------------------


@a_few_and(*(range(start, start + 10_000) for start in range(1000, 100_000, 10_000)), few=200)
def test_every_sample_of_every_epoch_counts_once_on_every_shard_whatever_happens(seeds: range) -> None:
    crashes = dropped = duplicates = 0
    for seed in seeds:
        chosen, rng = drawn(seed)
        trace = Trace(chosen, rng, num_workers=rng.randint(1, 5), num_shards=rng.randint(1, 3))
        trace.chance_of = {"crash": 0.02, "join": 0.04, "resize": 0.02, "fork": 0.01}
        if seed % 2:
            trace.chance_of["lost_answer"] = 0.05
        trace.run()
        check(trace)
        crashes, dropped, duplicates = crashes + trace.crashes, dropped + trace.dropped, trace.shards.duplicates
    assert crashes > len(seeds)
    assert dropped > 0
    assert duplicates >= 0


@a_few_and(range(20, 120))
def test_shares_by_speed_are_each_sample_once_and_never_staler_than_the_bound_whatever_happens(seeds: range) -> None:
    crashes = 0
    for seed in seeds:
        chosen, rng = drawn(seed, BY_SPEED)
        trace = Trace(chosen, rng, num_workers=rng.randint(1, 5), num_shards=rng.randint(1, 3))
        trace.chance_of = {"crash": 0.02, "join": 0.04, "resize": 0.02, "fork": 0.02, "lost_answer": 0.05 * (seed % 2)}
        if seed % 4 == 3:
            trace.chance_of["stop"] = 0.01
        trace.run()
        if trace.stop_asked_at is None:
            check(trace)
        trace.check_everything_applied_up_to(trace.coordinator.coordinator.step)
        assert all(value <= (chosen.bound or 0) for value in trace.staleness)
        crashes += trace.crashes
    assert crashes > len(seeds) / 3


def check(trace: Trace) -> None:
    """Check what holds of every run that has come to its end."""
    settings, coordinator = trace.settings, trace.coordinator.coordinator
    last = settings.last_step
    trace.check_everything_applied_up_to(last)
    assert [step.step for step in trace.steps] == list(range(1, last + 1))
    assert [step.batch_samples for step in trace.steps] == [settings.batch_samples(n) for n in range(1, last + 1)]
    assert [step.epoch for step in trace.steps] == [(n - 1) // settings.steps_per_epoch for n in range(1, last + 1)]
    told = sum(step.loss * step.batch_samples for step in trace.steps)
    assert told == pytest.approx(sum(map(loss_of, trace.samples_through(last))), rel=1e-12)
    assert coordinator.progress.samples_by_worker.total() == settings.samples_through(last)
    assert coordinator.progress.num_pushes == len(trace.shards.taken[0]) == coordinator.progress.staleness.total()
    assert coordinator.progress.dropped_copies == trace.dropped
    assert all(value <= (settings.bound or 0) for value in trace.staleness)
    every = settings.validate_every_steps or settings.steps_per_epoch
    assert [step for step, _ in trace.validations] == [n for n in range(1, last + 1) if n % every == 0 or n == last]
    mean = sum(range(settings.num_validation_samples)) / settings.num_validation_samples
    assert all(means == {"loss": pytest.approx(mean)} for _, means in trace.validations)
    often = settings.checkpoint_every_steps
    wanted = [] if often is None else [n for n in range(1, last + 1) if n % often == 0 or n == last]
    assert trace.saves == wanted


def test_batches_of_a_synchronous_or_stale_run_are_those_of_the_order_with_their_own_mean_loss() -> None:
    for seed in range(60):
        chosen, rng = drawn(seed)
        trace = Trace(replace(chosen, consistency="stale", lookahead=1), rng, num_workers=3)
        trace.chance_of = {"crash": 0.02, "join": 0.04}
        trace.run()
        for step in trace.steps:
            batch = trace.samples_through(step.step)[-step.batch_samples :]
            assert step.loss == pytest.approx(sum(map(loss_of, batch)) / len(batch), rel=1e-12)


@a_few_and(range(20, 100))
def test_a_run_that_is_stopped_has_applied_what_had_begun_and_no_more(seeds: range) -> None:
    short = 0
    for seed in seeds:
        chosen, rng = drawn(seed)
        trace = Trace(chosen, rng, num_workers=rng.randint(1, 4))
        trace.chance_of = {"crash": 0.02, "join": 0.04, "fork": 0.02, "stop": 0.02}
        trace.run()
        last = chosen.last_step if trace.stop_asked_at is None else trace.stop_asked_at
        trace.check_everything_applied_up_to(last)
        assert trace.coordinator.coordinator.step == len(trace.steps) == last
        assert chosen.checkpoint_every_steps is None or not last or trace.saves[-1] == last
        short += last < chosen.last_step
    assert short > len(seeds) / 5


# -- who gets what -----------------------------------------------------------------------------------------------------


def test_a_synchronous_batch_is_handed_out_in_order_and_the_next_one_only_when_it_is_applied() -> None:
    run = coordinator(3)
    orders = [compute(run, worker) for worker in range(3)]
    assert [order.pieces for order in orders] == [((0, 3),), ((3, 6),), ((6, 8),)]
    assert done(run, 2, orders[2]).done_steps == ()
    assert run.next(2) == Wait()
    assert done(run, 0, orders[0]).done_steps == ()
    assert done(run, 1, orders[1]).done_steps == (DoneStep(1, 0, 1.0, 8, 0),)
    assert [compute(run, worker).pieces for worker in (2, 0, 1)] == [((8, 11),), ((11, 14),), ((14, 16),)]


def test_micro_batches_are_cut_before_shares() -> None:
    order = compute(coordinator(1, accumulate=2), 0)
    assert order.pieces == ((0, 2), (4, 6))
    assert (order.num_samples, order.num_micro_batches, order.share, order.num_shares) == (4, 2, 0, 3)


def test_a_short_batch_has_no_share_without_a_sample() -> None:
    run = coordinator(3, num_samples=9, validate_every_steps=100)
    for worker, order in [(worker, compute(run, worker)) for worker in range(3)]:
        done(run, worker, order)
    last = compute(run, 1)
    assert (last.pieces, last.batch_samples, last.step) == (((8, 9),), 1, 2)
    assert [run.next(worker) for worker in (0, 2)] == [Wait(), Wait()]
    assert done(run, 1, last).done_steps[0].batch_samples == 1
    assert compute(run, 0).epoch == 1


def test_an_asynchronous_worker_gets_the_next_share_in_the_global_order_over_the_end_of_an_epoch() -> None:
    run = coordinator(2, consistency="asynchronous", validate_every_steps=100)
    slow = compute(run, 1)
    taken = [slow]
    for _ in range(9):
        taken.append(compute(run, 0))
        done(run, 0, taken[-1])
    positions = [(order.epoch, *piece) for order in taken for piece in order.pieces]
    assert positions == sorted(positions)
    assert (taken[0].epoch, taken[-1].epoch) == (0, 1)
    assert [order.order_id for order in taken] == list(range(10))


def test_an_asynchronous_step_is_batch_size_samples_applied_and_a_share_beyond_counts_for_both() -> None:
    run = coordinator(2, consistency="asynchronous", num_samples=20, batch_size=10, num_shares=3, epochs=1)
    slow = compute(run, 1)  # 4 samples
    fast: list[DoneStep] = []
    for _ in range(4):  # 3, 3, then 4 and 3 of the next batch
        order = compute(run, 0)
        loss = float(order.order_id) * order.num_samples / order.batch_samples
        fast += run.acknowledge(0, order.order_id, loss, read_version=0).done_steps
    (step,) = fast
    assert (step.step, step.batch_samples, step.staleness) == (1, 10, 2)
    assert step.loss == pytest.approx((3 * 1.0 + 3 * 2.0 + 4 * 3.0) / 10)
    last = compute(run, 0)
    run.acknowledge(0, last.order_id, 5.0 * 3 / 10, read_version=0)
    (step,) = run.acknowledge(1, slow.order_id, 7.0 * 4 / 10, read_version=0).done_steps
    assert (step.step, step.batch_samples, step.staleness) == (2, 10, 5)
    assert step.loss == pytest.approx((3 * 4.0 + 3 * 5.0 + 4 * 7.0) / 10)


def test_what_a_lost_worker_held_is_handed_out_first_under_the_same_id() -> None:
    run = coordinator(3, consistency="asynchronous")
    lost = compute(run, 1)
    for _ in range(3):
        done(run, 0, compute(run, 0))
    run.leave(1)
    assert compute(run, 2) == lost
    assert not run.claim(2, 99)
    with pytest.raises(ValueError, match=r"worker 1 has not joined, or was given up; the workers are \[0, 2\]"):
        run.next(1)


def test_the_share_of_a_lost_stale_worker_is_handed_out_before_any_other() -> None:
    run = coordinator(4, consistency="stale", staleness=3, num_shares=2)
    lost = compute(run, 1)
    done(run, 0, compute(run, 0))
    ahead = compute(run, 0)
    assert ahead.step == 2
    done(run, 0, ahead)
    run.leave(1)
    assert compute(run, 0) == lost  # although two other workers have not taken any share of that batch
    assert [compute(run, worker).order_id for worker in (2, 3)] == [3, 4]


def test_fewer_workers_than_shares_compute_them_all() -> None:
    for consistency in ("synchronous", "stale", "asynchronous"):
        run = coordinator(1, consistency=consistency, staleness=2)
        ids = []
        for _ in range(6):
            order = compute(run, 0)
            ids.append(order.order_id)
            done(run, 0, order)
        assert ids == list(range(6))


def test_a_stale_worker_takes_one_share_of_a_batch_and_leaves_the_others_to_the_slow_one() -> None:
    run = coordinator(2, consistency="stale", staleness=2, num_shares=2, num_samples=80)
    slow = compute(run, 1)
    ahead = [compute(run, 0)]
    while not isinstance(run.next(0, []), Wait):
        done(run, 0, ahead[-1])
        order = run.next(0)
        if isinstance(order, Wait):
            break
        assert isinstance(order, Compute)
        ahead.append(order)
    assert [order.step for order in ahead] == [1, 2, 3]
    assert {order.share for order in ahead} == {0, 1}
    assert done(run, 1, slow).done_steps[0].step == 1
    assert [compute(run, 0).step, compute(run, 1).step] == [4, 2]


def test_a_synchronous_step_has_the_same_bits_of_loss_in_whatever_order_its_shares_come() -> None:
    losses = set()
    for order_of_workers in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        run = coordinator(3)
        orders = [compute(run, worker) for worker in range(3)]
        for worker in order_of_workers:
            ack = run.acknowledge(worker, orders[worker].order_id, [0.1, 0.2, 0.3][worker], read_version=0)
        losses.add(ack.done_steps[0].loss)
    assert losses == {0.1 + 0.2 + 0.3}


def test_a_step_tells_the_largest_staleness_of_its_pushes() -> None:
    for consistency in ("stale", "asynchronous"):
        run = coordinator(2, num_shares=2, num_samples=8, consistency=consistency, staleness=9)
        orders = [compute(run, worker) for worker in range(2)]
        run.acknowledge(0, orders[0].order_id, 0.0, read_version=1, write_version=6)
        (step,) = run.acknowledge(1, orders[1].order_id, 0.0, read_version=6, write_version=7).done_steps
        assert step.staleness == 5
        assert run.progress.staleness == {5: 1, 1: 1}


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_worker_holds_no_more_shares_than_it_may_and_is_told_to_push_those(lookahead: int) -> None:
    run = coordinator(1, consistency="asynchronous", lookahead=lookahead)
    held = [compute(run, 0) for _ in range(lookahead)]
    assert run.next(0) == Wait(drain=True)
    done(run, 0, held[0])
    assert compute(run, 0).order_id == lookahead


def test_batches_are_cut_anew_from_the_first_that_nobody_has_begun() -> None:
    run = coordinator(4, num_shares=2, num_samples=80)
    begun = compute(run, 0)
    run.resize(4)
    other = compute(run, 1)
    assert [(order.num_shares, order.num_samples) for order in (begun, other)] == [(2, 4), (2, 4)]
    assert run.next(2) == Wait()
    done(run, 0, begun)
    done(run, 1, other)
    orders = [compute(run, worker) for worker in range(4)]
    assert [(order.num_shares, order.num_samples) for order in orders] == [(4, 2)] * 4
    with pytest.raises(ValueError, match="num_shares must be at least 1"):
        run.resize(0)


@pytest.mark.parametrize("consistency", ["synchronous", "stale", "asynchronous"])
def test_workers_go_from_two_to_four_to_one_and_every_sample_counts_once(consistency: str) -> None:
    for seed in range(20):
        chosen = settings(consistency=consistency, staleness=1, num_shares=2, num_samples=64, epochs=3)
        trace = Trace(chosen, random.Random(seed), num_workers=2)
        changes = {8: (4, [2, 3], []), 16: (1, [], [0, 3, 2])}
        seen = Counter[int]()

        def change(trace: Trace = trace, changes: dict[int, Any] = changes, seen: Counter[int] = seen) -> None:
            seen[len(trace.workers)] += 1
            for step in [step for step in changes if trace.coordinator.coordinator.step >= step]:
                num_shares, joining, leaving = changes.pop(step)
                trace.coordinator("resize", num_shares)
                for rank in joining:
                    trace.join(rank)
                for rank in leaving:
                    trace.crash(rank)

        trace.on_event = change
        trace.run()
        check(trace)
        assert set(seen) == {2, 4, 1}
        assert {order.num_shares for order in trace.shards.taken[0].values()} == {2, 4, 1}

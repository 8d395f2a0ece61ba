"""The ledger: every sample once whatever happens, no worker too far ahead, barriers at which everything is applied."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.orders import Ack, Compute, DoneStep, Finish, Save, Validate, Wait
from orchestray.trainers.central.plan import LedgerSettings
from support.ledger_traces import Trace, loss_of


def settings(**options: Any) -> LedgerSettings:
    given = {"num_samples": 21, "num_validation_samples": 7, "batch_size": 8, "num_shares": 3, **options}
    if "total_steps" not in given:
        given.setdefault("epochs", 2)
    return LedgerSettings(**given)


def ledger(num_workers: int, **options: Any) -> Ledger:
    made = Ledger(settings(**options))
    for worker in range(num_workers):
        made.join(worker)
    return made


def compute(ledger: Ledger, worker: int) -> Compute:
    order = ledger.next(worker)
    assert isinstance(order, Compute), order
    return order


def done(ledger: Ledger, worker: int, order: Compute, **options: Any) -> Ack:
    assert ledger.claim(worker, order.order_id)
    return ledger.acknowledge(
        worker,
        order.order_id,
        order.num_samples / order.batch_samples,
        **{"read_version": order.min_version, **options},
    )


CONSISTENCIES = [
    {"consistency": "synchronous"},
    {"consistency": "stale", "staleness": 0},
    {"consistency": "stale", "staleness": 2},
    {"consistency": "asynchronous"},
    {"consistency": "asynchronous", "lookahead": 2},
]


def drawn(seed: int) -> tuple[LedgerSettings, random.Random]:
    """Settings of a small run, drawn at random."""
    rng = random.Random(seed)
    chosen = settings(
        num_samples=rng.randint(1, 40),
        batch_size=rng.randint(1, 20),
        num_shares=rng.randint(1, 5),
        accumulate=rng.randint(1, 3),
        epochs=rng.randint(1, 3),
        backup_workers=rng.choice([0, 0, 1, 2]),
        validate_every_steps=rng.choice([None, None, 3]),
        checkpoint_every_steps=rng.choice([None, 2, 5]),
        num_validation_samples=rng.randint(1, 9),
        **rng.choice(CONSISTENCIES),
    )
    return chosen, rng


# -- whatever happens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hundred", range(4))
def test_every_sample_of_every_epoch_counts_once_on_every_shard_whatever_happens(hundred: int) -> None:
    crashes = dropped = duplicates = 0
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        chosen, rng = drawn(seed)
        trace = Trace(chosen, rng, num_workers=rng.randint(1, 5), num_shards=rng.randint(1, 3))
        trace.chance_of = {"crash": 0.02, "join": 0.04, "resize": 0.02, "fork": 0.01}
        if seed % 2:
            trace.chance_of["lost_answer"] = 0.05
        trace.run()
        check(trace)
        crashes, dropped, duplicates = crashes + trace.crashes, dropped + trace.dropped, trace.shards.duplicates
    assert crashes > 100
    assert dropped > 0
    assert duplicates >= 0


def check(trace: Trace) -> None:
    """What holds of every run that has come to its end."""
    settings, ledger = trace.settings, trace.ledger.ledger
    last = settings.last_step
    trace.check_everything_applied_up_to(last)
    assert [step.step for step in trace.steps] == list(range(1, last + 1))
    assert [step.batch_samples for step in trace.steps] == [settings.batch_samples(n) for n in range(1, last + 1)]
    assert [step.epoch for step in trace.steps] == [(n - 1) // settings.steps_per_epoch for n in range(1, last + 1)]
    told = sum(step.loss * step.batch_samples for step in trace.steps)
    assert told == pytest.approx(sum(map(loss_of, trace.samples_through(last))), rel=1e-12)
    assert ledger.accounts.samples_by_worker.total() == settings.samples_through(last)
    assert ledger.accounts.num_pushes == len(trace.shards.taken[0]) == ledger.accounts.staleness.total()
    assert ledger.accounts.dropped_copies == trace.dropped
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

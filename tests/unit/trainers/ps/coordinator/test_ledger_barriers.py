"""The coordinator: copies of shares, requests that are repeated, barriers, and how a run ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Ack, Compute, Finish, Save, Validate, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from support.ledgers import compute, coordinator, done, settings

# -- copies ------------------------------------------------------------------------------------------------------------


def test_an_idle_worker_repeats_the_oldest_share_under_way_and_the_first_answer_counts() -> None:
    run = coordinator(4, backup_workers=1)
    first, *_ = (compute(run, worker) for worker in range(3))
    copy = compute(run, 3)
    assert copy == replace(first, copy=True)
    assert run.claim(3, copy.order_id)
    assert not run.claim(0, first.order_id)
    assert run.acknowledge(3, copy.order_id, 0.0, read_version=0) == Ack(counts=True)
    assert run.acknowledge(0, first.order_id, 0.0, read_version=0) == Ack(counts=False)
    assert run.progress.dropped_copies == 1
    assert run.progress.samples_by_worker == {3: 3}


def test_who_computes_a_share_that_another_has_finished_is_told_of() -> None:
    run = coordinator(4, backup_workers=1)
    first, *_ = (compute(run, worker) for worker in range(3))
    compute(run, 3)
    assert done(run, 0, first).dropped == (3,)
    assert run.progress.dropped_copies == 1


def test_no_more_workers_are_busy_with_copies_than_there_are_backup_workers() -> None:
    run = coordinator(5, backup_workers=1)
    first, *_ = (compute(run, worker) for worker in range(3))
    assert compute(run, 3).copy
    assert run.next(4) == Wait()
    done(run, 0, first)  # worker 3 does not know yet that its copy is not needed
    assert run.next(0) == Wait()
    assert compute(run, 3).copy


def test_a_worker_that_has_a_share_of_its_own_gets_no_copy() -> None:
    run = coordinator(4, backup_workers=1, lookahead=2)
    for worker in range(3):
        compute(run, worker)
    assert run.next(2) == Wait(drain=True)
    assert compute(run, 3).copy


def test_a_share_that_another_has_claimed_cannot_be_acknowledged() -> None:
    run = coordinator(4, backup_workers=1)
    first, *_ = (compute(run, worker) for worker in range(3))
    copy = compute(run, 3)
    assert run.claim(3, copy.order_id)
    assert run.acknowledge(0, first.order_id, 0.0, read_version=0) == Ack(counts=False)
    assert run.acknowledge(2, first.order_id, 0.0, read_version=0) == Ack(counts=False)  # never had it
    assert run.progress.num_pushes == 0
    assert run.acknowledge(3, copy.order_id, 0.0, read_version=0).counts


def test_without_backup_workers_nothing_is_computed_twice() -> None:
    run = coordinator(4)
    for worker in range(3):
        compute(run, worker)
    assert run.next(3) == Wait()


def test_a_claim_goes_back_with_the_worker_that_had_it() -> None:
    run = coordinator(4, backup_workers=1)
    first, *_ = (compute(run, worker) for worker in range(3))
    copy = compute(run, 3)
    assert run.claim(0, first.order_id)
    run.leave(0)
    assert run.claim(3, copy.order_id)
    run.leave(3)
    run.join(0)
    again = compute(run, 0)
    assert again == first
    assert run.claim(0, again.order_id)


# -- what is repeated --------------------------------------------------------------------------------------------------


def test_requests_may_be_repeated_after_the_lead_was_replaced() -> None:
    run = coordinator(2, num_shares=2)
    order = compute(run, 0)
    assert run.next(0) == Wait(drain=True)
    assert run.next(0, holding=[]) == order  # the answer was lost
    assert run.claim(0, order.order_id)
    assert run.claim(0, order.order_id)
    other = compute(run, 1)
    done(run, 1, other)
    assert [ack.counts for ack in (done(run, 0, order), done(run, 0, order))] == [True, True]
    assert run.progress.num_pushes == 2
    assert run.settled == 2


def test_a_lost_order_to_validate_or_save_is_given_again() -> None:
    run = coordinator(1, total_steps=1, num_shares=1, checkpoint_every_steps=1)
    done(run, 0, compute(run, 0))
    for report in (lambda order: run.validated(0, order.order_id, {}), lambda order: run.saved(0, order.order_id)):
        order = run.next(0)
        assert run.next(0) == Wait(drain=True)
        assert run.next(0, []) == order
        report(order)
    assert run.next(0) == Finish("finished")


# -- barriers ----------------------------------------------------------------------------------------------------------


def barrier_of(consistency: str, **options: Any) -> tuple[Coordinator, list[Compute]]:
    """Return a run of three workers, each of which holds a share of the batch after which something is due."""
    run = coordinator(3, consistency=consistency, staleness=3, **options)
    return run, [compute(run, worker) for worker in range(3)]


@pytest.mark.parametrize("consistency", ["synchronous", "stale", "asynchronous"])
def test_nobody_gets_a_share_of_the_next_batch_before_the_validation_and_the_checkpoint(consistency: str) -> None:
    run, orders = barrier_of(consistency, validate_every_steps=1, checkpoint_every_steps=1)
    for worker in (1, 2):
        done(run, worker, orders[worker])
        assert run.next(worker) == Wait()
    done(run, 0, orders[0])
    parts = [run.next(worker) for worker in (2, 0)]
    assert parts == [Validate(3, 1, 0, 3), Validate(4, 1, 1, 3)]
    assert run.validated(2, 3, {"loss": 3.0, "accuracy": 1.0}) is None
    assert run.next(2) == Validate(5, 1, 2, 3)
    assert run.next(1) == Wait()
    run.leave(0)
    assert run.next(1) == Validate(4, 1, 1, 3)
    assert run.validated(0, 4, {"loss": 100.0}) is None  # given up
    assert run.validated(2, 5, {}) is None
    assert run.validated(1, 4, {"loss": 4.0, "accuracy": 6.0}) == {"loss": 1.0, "accuracy": 1.0}
    assert run.validation == {"loss": 1.0, "accuracy": 1.0}
    save = run.next(1)
    assert save == Save(6, 1)
    assert run.next(2) == Wait()
    run.leave(1)
    assert run.next(2) == save
    assert not run.saved(1, 6)
    assert run.saved(2, 6)
    assert compute(run, 2).step == 2


def test_there_are_no_more_parts_of_a_validation_than_samples() -> None:
    run, orders = barrier_of("synchronous", num_validation_samples=2, validate_every_steps=1)
    for worker in range(3):
        done(run, worker, orders[worker])
    assert [getattr(run.next(worker), "num_parts", None) for worker in range(3)] == [2, 2, None]


@pytest.mark.parametrize("consistency", ["synchronous", "stale", "asynchronous"])
def test_a_stop_ends_after_the_batches_that_have_begun_with_a_checkpoint(consistency: str) -> None:
    run, orders = barrier_of(consistency, checkpoint_every_steps=100)
    run.request_stop("interrupted")
    run.request_stop("until")
    for worker in range(3):
        done(run, worker, orders[worker])
    assert run.step == 1
    assert run.next(0) == Save(3, 1)
    assert run.ended is None
    assert run.next(1) == Wait()
    run.saved(0, 3)
    assert [run.next(worker) for worker in range(3)] == [Finish("interrupted")] * 3
    assert run.ended == Finish("interrupted")


def test_a_time_limit_validates_before_it_saves() -> None:
    run = coordinator(1, num_shares=1, checkpoint_every_steps=100)
    order = compute(run, 0)
    run.request_stop("time_limit_s", validate=True)
    done(run, 0, order)
    assert run.next(0) == Validate(1, 1, 0, 1)
    run.validated(0, 1, {"loss": 7.0})
    assert run.next(0) == Save(2, 1)
    run.saved(0, 2)
    assert run.next(0) == Finish("time_limit_s")


def test_a_condition_met_in_a_validation_ends_the_run_there() -> None:
    run = coordinator(1, num_shares=1, validate_every_steps=1, checkpoint_every_steps=100)
    done(run, 0, compute(run, 0))
    run.next(0)
    assert run.validated(0, 1, {"loss": 7.0}) == {"loss": 1.0}
    run.request_stop("until")
    assert run.next(0) == Save(2, 1)
    run.saved(0, 2)
    assert run.next(0) == Finish("until")


def test_the_best_checkpoint_is_saved_before_any_worker_trains_on() -> None:
    run = coordinator(
        1, num_shares=1, validate_every_steps=1, checkpoint_every_steps=100, best=("loss", "min"), total_steps=4
    )
    saved = []
    for step, loss in enumerate((7.0, 14.0, 3.5), start=1):
        done(run, 0, compute(run, 0))
        run.validated(0, run.next(0).order_id, {"loss": loss})  # type: ignore[union-attr]
        run = Coordinator.from_json(json.loads(json.dumps(run.to_json())))
        if loss != 14.0:
            order = run.next(0)
            assert isinstance(order, Save)
            saved.append(order.step)
            run.saved(0, order.order_id)
        assert run.best is not None
        assert run.best["step"] == saved[-1]
        assert run.step == step
    assert saved == [1, 3]


def test_a_stop_before_the_first_step_of_a_resumed_run_leaves_nothing_to_do() -> None:
    run = coordinator(2, start_step=3, checkpoint_every_steps=1)
    run.request_stop("interrupted")
    assert run.next(0) == Finish("interrupted")


def test_an_interrupt_that_cuts_nothing_short_is_none() -> None:
    run = coordinator(1, num_shares=1, total_steps=1)
    order = compute(run, 0)
    run.request_stop("interrupted")
    done(run, 0, order)
    validate = run.next(0)
    assert isinstance(validate, Validate)  # due after the last step
    run.validated(0, validate.order_id, {})
    assert run.next(0) == Finish("finished")


def test_a_resumed_run_goes_on_with_the_batch_after_its_start() -> None:
    for consistency in ("synchronous", "asynchronous"):
        run = coordinator(1, start_step=4, num_shares=1, consistency=consistency)
        order = compute(run, 0)
        assert (order.step, order.epoch, order.step_in_epoch, order.pieces) == (5, 1, 1, ((8, 16),))
        assert done(run, 0, order).done_steps[0].step == 5
    assert coordinator(1, start_step=6).next(0) == Finish("finished")


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_run_has_either_steps_or_epochs() -> None:
    for wrong in ({"epochs": 1, "total_steps": 1}, {"epochs": None, "total_steps": None}):
        with pytest.raises(ValueError, match="either total_steps or epochs is to be given"):
            CoordinatorSettings(num_samples=1, num_validation_samples=1, batch_size=1, num_shares=1, **wrong)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        settings(batch_size=0)
    assert settings(total_steps=17).last_step == 17
    assert settings(epochs=3).last_step == 9

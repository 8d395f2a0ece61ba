"""Group C: a pipeline in training and what feeds it go at the pace of the slower one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.tasks.paced_digits import PacedDigits
from support.central import run_all
from support.layouts import layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.training import few_digits

MICRO_BATCHES, STEPS = 4, 8
MOST_AHEAD = (1 + 2 + 1) * MICRO_BATCHES
"""Micro-batches that a stage has read before its batch is done: of that one, of two prefetched, and of one more."""
# Said to be between samples, the loss is not tried on parts of the first batch.
SETTINGS = layout_settings({"pipeline": 2, "microbatches": MICRO_BATCHES}, steps=STEPS, loss_is="between_samples")


class Counted:
    """A number that grows, and that others wait for."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def add(self, number: int = 1) -> int:
        with self._changed:
            self.count += number
            self._changed.notify_all()
            return self.count

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, PATIENCE_S)


@pytest.fixture(autouse=True)
def _begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks know when the training begins: before, workers read a batch to look at their parts of the model."""
    run = Replica.run

    def begun(replica: Any, *arguments: Any) -> Any:
        replica.task.is_training.set()
        return run(replica, *arguments)

    monkeypatch.setattr(Replica, "run", begun)


def task(feed: Callable[[int], None], done: Callable[[], None]) -> Any:
    """Return a task that calls `feed` with the number of each micro-batch to be read, and `done` at each loss."""
    made: Any = few_digits()
    made.is_training, read = threading.Event(), Counted()
    to_batch, loss = made.to_batch, made.loss

    def fed(columns: Any) -> Any:
        if made.is_training.is_set() and threading.current_thread().name == "prefetch":
            feed(read.add())
        return to_batch(columns)

    def noted(outputs: Any, batch: Any) -> Any:
        if made.is_training.is_set() and outputs.requires_grad:
            done()
        return loss(outputs, batch)

    made.to_batch, made.loss = fed, noted
    return made


def test_a_throttled_pipeline_does_what_it_is_fed_and_needs_nothing_that_comes_later() -> None:
    allowed, done, early = Counted(), Counted(), []

    def feed(number: int) -> None:
        allowed.wait_for(number)

    def throttle() -> None:
        for step in range(1, STEPS + 1):
            early.append(done.count - (step - 1) * MICRO_BATCHES)
            allowed.add(MICRO_BATCHES)
            done.wait_for(step * MICRO_BATCHES)
        allowed.add(10 * MICRO_BATCHES)  # what has been read ahead is not trained on

    run_all([lambda: train_laid_out(lambda: task(feed, done.add), SETTINGS), throttle])
    assert early == [0] * STEPS
    assert done.count == STEPS * MICRO_BATCHES


@pytest.mark.parametrize("held_at", [0, 9])
def test_what_feeds_a_pipeline_that_stands_still_is_held_up_by_bounded_queues(held_at: int) -> None:
    """Let the last stage stand still in one micro-batch, until both stages have read as far ahead as they can."""
    done, reads, leads = Counted(), list[Counted](), list[int]()

    def made() -> Any:
        own = Counted()
        reads.append(own)

        def feed(number: int) -> None:
            if done.count < STEPS * MICRO_BATCHES:
                leads.append(number - done.count // MICRO_BATCHES * MICRO_BATCHES)
            own.add()

        return task(feed, end)

    def end() -> None:
        if done.count == held_at:
            for own in reads:
                own.wait_for((held_at // MICRO_BATCHES) * MICRO_BATCHES + MOST_AHEAD)
        done.add()

    train_laid_out(made, SETTINGS)
    assert len(reads) == 2
    assert max(leads) == MOST_AHEAD


class _Paced(PacedDigits):
    """Digits at a pace, and the event with which the tests above learn that the training begins."""

    is_training = threading.Event()


def test_a_pipeline_is_no_faster_than_what_feeds_it_and_counts_the_time_without_samples() -> None:
    per_s, batch = 400.0, SETTINGS.batch_size
    outcome = train_laid_out(lambda: _Paced(per_s, hidden=[16], validation_fraction=0.02), SETTINGS).outcome
    # All samples, but for those that may have been read before the training began.
    fed_s = (STEPS * batch - MOST_AHEAD // MICRO_BATCHES * batch) / per_s
    assert outcome.training_s >= fed_s
    for worker in (one["worker"] for one in outcome.usage):
        assert 0 < worker["starved_s"] <= outcome.training_s - worker["busy_s"] - worker["waited_s"]

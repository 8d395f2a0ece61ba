"""Runners that are given full batches ahead, so that they are busy while the event loop is: in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from orchestray.serving.batching import (
    Batcher,
    BatcherClosedError,
    BatchListener,
    DeadlineError,
    Greedy,
    RunTimeoutError,
)
from orchestray.serving.batching.runner import RunFunction
from support.batching import in_virtual_time


class Line:
    """A runner that runs batches one after the other, in order, as a thread of its own does."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.turn = asyncio.Lock()
        self.begun: list[list[int]] = []
        self.num_given = self.most_given = 0

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.num_given += 1
        self.most_given = max(self.most_given, self.num_given)
        try:
            async with self.turn:
                self.begun.append(list(items))
                await asyncio.sleep(self.seconds.pop(0) if self.seconds else 0.01)
        finally:
            self.num_given -= 1
        return [2 * item for item in items]


def batcher_of(run: RunFunction[int, int], timeout_s: float | None = None, **more: object) -> Batcher[int, int]:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4, run_timeout_s=timeout_s)
    # It is never slower than the loop, whose rounds take no time here.
    batcher.add_runner(run, pace_s=lambda: 0.0, **more)  # type: ignore[arg-type]
    return batcher


@in_virtual_time
async def test_full_batches_are_given_ahead_and_run_in_order_and_what_is_not_full_may_still_fill() -> None:
    line = Line()
    batcher = batcher_of(line)
    answers = [asyncio.ensure_future(batcher.submit(number)) for number in range(10)]
    await asyncio.sleep(0.005)
    assert line.most_given == 2
    assert batcher.stats.num_queued == 2
    answers += [asyncio.ensure_future(batcher.submit(number)) for number in (10, 11)]
    assert await asyncio.gather(*answers) == [2 * number for number in range(12)]
    assert line.begun == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    await batcher.close()


@in_virtual_time
async def test_a_runner_without_a_pace_has_one_batch_at_a_time() -> None:
    line = Line()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(line)
    assert await asyncio.gather(*(batcher.submit(number) for number in range(40))) == list(range(0, 80, 2))
    assert line.most_given == 1
    await batcher.close()


@in_virtual_time
async def test_no_more_is_given_ahead_than_a_few_batches() -> None:
    line = Line()
    batcher = batcher_of(line)
    await asyncio.gather(*(batcher.submit(number) for number in range(200)))
    assert 2 < line.most_given <= 8
    await batcher.close()


@in_virtual_time
async def test_what_a_runner_that_hangs_had_not_begun_is_run_by_the_one_that_replaces_it() -> None:
    hangs, heir = Line(1000.0), Line()
    batcher = batcher_of(hangs, 1.0, replace=lambda: heir)
    found = await asyncio.gather(*(batcher.submit(number) for number in range(12)), return_exceptions=True)
    assert all(isinstance(each, RunTimeoutError) for each in found[:4])
    assert found[4:] == [2 * number for number in range(4, 12)]
    assert hangs.begun == [[0, 1, 2, 3]]
    assert [item for batch in heir.begun for item in batch] == list(range(4, 12))
    await batcher.close()


@in_virtual_time
async def test_what_was_given_ahead_has_its_time_from_the_end_of_what_was_before_it() -> None:
    line = Line(0.8, 0.8, 1000.0)
    batcher = batcher_of(line, 1.0)
    found = await asyncio.gather(*(batcher.submit(number) for number in range(12)), return_exceptions=True)
    assert found[:8] == [2 * number for number in range(8)]
    assert all(isinstance(each, RunTimeoutError) for each in found[8:])
    assert asyncio.get_running_loop().time() == pytest.approx(2.6)
    await batcher.close()


class Told(BatchListener):
    """A listener that keeps its calls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def batch_started(self, runner: str, queue_s: Sequence[float]) -> None:
        self.events.append(("started", len(queue_s)))

    def batch_finished(self, runner: str, num_items: int, service_s: float, error: BaseException | None) -> None:
        self.events.append(("finished" if error is None else "failed", num_items))

    def batch_taken_back(self, runner: str, num_items: int) -> None:
        self.events.append(("taken back", num_items))

    def runner_failed(self, runner: str, error: BaseException) -> None:
        self.events.append(("runner failed", 0))


class Counting(Greedy):
    """A greedy policy that counts the ends of batches."""

    num_finished = 0

    def finished(self, now_s: float, num_items: int) -> None:
        self.num_finished += 1


@in_virtual_time
async def test_batches_that_a_runner_had_not_begun_when_it_hung_are_told_as_taken_back_and_not_as_failed() -> None:
    told, policy = Told(), Counting()
    batcher: Batcher[int, int] = Batcher(policy=policy, max_batch_size=4, run_timeout_s=1.0, listener=told)
    heir = Line()
    batcher.add_runner(Line(1000.0), pace_s=lambda: 0.0, replace=lambda: heir)
    await asyncio.gather(*(batcher.submit(number) for number in range(12)), return_exceptions=True)
    failure = [("failed", 4), ("taken back", 4), ("taken back", 4), ("runner failed", 0)]
    assert told.events[:7] == [("started", 4)] * 3 + failure
    counts = Counter(what for what, _ in told.events)
    assert counts == {"started": 5, "failed": 1, "taken back": 2, "finished": 2, "runner failed": 1}
    assert policy.num_finished == batcher.stats.num_batches == 3
    await batcher.close()


@in_virtual_time
async def test_a_deadline_that_passes_before_its_batch_is_begun_did_not_pass_while_it_was_computed() -> None:
    line = Line(1.0)
    batcher = batcher_of(line)
    deadline_s = asyncio.get_running_loop().time() + 0.5
    waiting = [batcher.put(number, deadline_s=deadline_s) for number in range(8)]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert line.begun == [[0, 1, 2, 3]]
    assert all(isinstance(each, DeadlineError) for each in found)
    retries_s = [each.retry_after_s for each in found if isinstance(each, DeadlineError)]
    assert retries_s[:4] == [None] * 4
    assert all(retry_s is not None and retry_s > 0 for retry_s in retries_s[4:])
    await batcher.close()


@in_virtual_time
async def test_one_pause_while_answers_are_sent_does_not_spoil_what_deadlines_are_held_against() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    for _ in range(50):
        batcher.model.observe_answers(0.001)
    batcher.model.observe_answers(1.0)
    assert batcher.model.answer_s < 0.0014
    for _ in range(50):
        batcher.model.observe_answers(1.0)
    assert batcher.model.answer_s > 0.5, "what lasts is learned"


@in_virtual_time
async def test_the_time_of_a_batch_begins_when_the_one_before_it_has_ended() -> None:
    line = Line(0.9, 0.9, 0.9)
    batcher = batcher_of(line, 1.0)
    assert await asyncio.gather(*(batcher.submit(number) for number in range(12))) == list(range(0, 24, 2))
    await batcher.close()


@in_virtual_time
async def test_an_end_without_draining_fails_what_was_given_ahead() -> None:
    batcher = batcher_of(Line())
    waiting = [asyncio.ensure_future(batcher.submit(number)) for number in range(12)]
    await asyncio.sleep(0.015)
    await batcher.close(drain=False)
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found[:4] == [0, 2, 4, 6]
    assert all(isinstance(each, BatcherClosedError) for each in found[4:])


@in_virtual_time
async def test_an_end_with_draining_waits_for_what_was_given_ahead() -> None:
    batcher = batcher_of(Line())
    waiting = [asyncio.ensure_future(batcher.submit(number)) for number in range(12)]
    await asyncio.sleep(0.005)
    await batcher.close()
    assert [each.result() for each in waiting] == list(range(0, 24, 2))


@in_virtual_time
async def test_batches_that_end_together_are_each_taken_to_have_had_their_part_of_the_time() -> None:
    done = asyncio.Event()

    async def together(items: Sequence[int]) -> list[int]:
        await done.wait()
        return list(items)

    batcher = batcher_of(together)
    waiting = [asyncio.ensure_future(batcher.submit(number)) for number in range(16)]
    await asyncio.sleep(0.08)
    done.set()
    await asyncio.gather(*waiting)
    await asyncio.sleep(0)
    assert batcher.model.predict_s(4) == pytest.approx(0.02)
    await batcher.close()


@in_virtual_time
async def test_a_deadline_is_held_against_the_end_of_the_answers_and_not_only_of_the_batch() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    for _ in range(50):
        batcher.model.observe(4, 0.02)
    before_s = batcher.model.cautious_s(4)
    for _ in range(200):
        batcher.model.observe_answers(0.005)
    assert batcher.model.cautious_s(4) - before_s == pytest.approx(0.005, rel=0.01)
    assert batcher.model.predict_s(4) == pytest.approx(0.02)


def known(run: RunFunction[int, int], pace_s: float) -> Batcher[int, int]:
    """Return a batcher of batches of four, which knows how long its runner takes for one."""
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(run, pace_s=lambda: pace_s)
    for _ in range(30):
        batcher.model.observe(4, pace_s)
    return batcher


@in_virtual_time
async def test_what_is_given_ahead_is_judged_by_when_what_runs_will_be_over_and_not_by_all_that_it_takes() -> None:
    pace_s, loop = 0.02, asyncio.get_running_loop()
    line = Line(pace_s, pace_s)
    batcher = known(line, pace_s)
    admission = batcher._core.admission
    running = [batcher.put(number) for number in range(4)]
    await asyncio.sleep(0.9 * pace_s)
    for _ in range(8):
        admission.came_round(0.15 * pace_s)  # long enough that a batch is given ahead
    behind = [batcher.put(number, deadline_s=loop.time() + 1.6 * pace_s) for number in range(4, 8)]
    assert await asyncio.gather(*running, *behind) == [2 * number for number in range(8)]
    assert line.most_given == 2
    assert not batcher.stats.num_shed
    await batcher.close()


@in_virtual_time
async def test_where_rounds_are_short_a_batch_is_given_ahead_near_the_end_and_until_then_may_be_overtaken() -> None:
    pace_s = 0.02
    line = Line(*[pace_s] * 3)
    batcher = known(line, pace_s)
    answers = [batcher.put(number) for number in range(8)]
    await asyncio.sleep(0.7 * pace_s)
    assert line.most_given == 1
    answers += [batcher.put(number, priority=1) for number in range(8, 10)]
    await asyncio.sleep(0.2 * pace_s)
    assert line.most_given == 2
    answers += [batcher.put(number, priority=1) for number in range(10, 12)]
    await asyncio.gather(*answers)
    assert line.begun == [[0, 1, 2, 3], [8, 9, 4, 5], [10, 11, 6, 7]]
    await batcher.close()


@in_virtual_time
async def test_a_batch_that_is_no_longer_full_without_those_that_are_late_is_not_given_ahead() -> None:
    pace_s, loop = 0.02, asyncio.get_running_loop()
    line = Line(pace_s, pace_s)
    batcher = known(line, pace_s)
    others = [batcher.put(number) for number in range(4)]
    await asyncio.sleep(0.1 * pace_s)
    late = [batcher.put(number, deadline_s=loop.time() + 2.2 * pace_s) for number in range(4, 6)]
    others += [batcher.put(number) for number in range(6, 9)]
    await asyncio.sleep(0.1 * pace_s)
    for _ in range(100):
        batcher.model.observe(4, 3 * pace_s)
    assert await asyncio.gather(*others) == [2 * number for number in (*range(4), *range(6, 9))]
    for each in late:
        assert isinstance(each.exception(), DeadlineError)
    assert line.most_given == 1
    assert line.begun == [[0, 1, 2, 3], [6, 7, 8]]
    await batcher.close()


@in_virtual_time
async def test_nothing_is_given_ahead_before_it_is_known_how_long_a_batch_takes() -> None:
    line = Line(1.0)
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(line, pace_s=lambda: math.inf)
    answers = [batcher.put(number) for number in range(8)]
    await asyncio.sleep(0.5)
    assert line.most_given == 1
    await asyncio.gather(*answers)
    await batcher.close()

"""Failure of a batch: only the requests that it fails for fail, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from orchestray.platform.sim.event_loop import run
from orchestray.serving.batching import (
    Batcher,
    BatcherClosedError,
    BatchFunctionError,
    BatchListener,
    DeadlineError,
    Greedy,
    RunnerLostError,
    RunTimeoutError,
)
from support.batching import in_virtual_time, now_s, outcomes

CALL_S = 0.02


class Touchy:
    """A batch function that answers in `CALL_S`, raises where a bad item is in the batch, and keeps its inputs."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.calls: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        await asyncio.sleep(CALL_S)
        if self.bad & set(items):
            raise RuntimeError("odd")
        return [10 * item for item in items]


async def raises(items: Sequence[int]) -> Any:
    raise RuntimeError("odd")


async def none(items: Sequence[int]) -> Any:
    return []


async def no_sequence(items: Sequence[int]) -> Any:
    return None


async def cancels_itself(items: Sequence[int]) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize("fails", [raises, none, no_sequence, cancels_itself])
@pytest.mark.parametrize("bad", [{0}, {2, 3}, {4}, {0, 1, 2, 3, 4}], ids=str)
def test_of_a_batch_that_fails_the_requests_that_it_fails_for_fail_alone(
    fails: Callable[[Sequence[int]], Awaitable[Any]], bad: set[int]
) -> None:
    """Try functions that raise for them and functions that answer too few."""

    async def main() -> None:
        async def touchy(items: Sequence[int]) -> Any:
            return await fails(items) if bad & set(items) else [10 * item for item in items]

        batcher: Batcher[int, int] = Batcher(policy=Greedy())
        batcher.add_runner(touchy)
        found = await outcomes([batcher.submit(number) for number in range(5)])
        for number, answer in enumerate(found):
            if number in bad:
                assert isinstance(answer, BatchFunctionError)
            else:
                assert answer == 10 * number
        await batcher.close()

    run(main())


@in_virtual_time
async def test_parts_go_before_all_that_waits_and_are_answered_as_each_is_known() -> None:
    touchy = Touchy(3)
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(touchy)
    answered_s: dict[int, float] = {}

    async def ask(number: int) -> None:
        await outcomes([batcher.submit(number)])
        answered_s[number] = now_s()

    await asyncio.gather(*(ask(number) for number in range(8)))
    assert touchy.calls == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3], [4, 5, 6, 7]]
    in_calls = [2, 2, 4, 5, 6, 6, 6, 6]
    assert list(answered_s) == list(range(8))
    assert list(answered_s.values()) == pytest.approx([CALL_S * calls for calls in in_calls])
    await batcher.close()


@in_virtual_time
async def test_nothing_is_run_for_who_has_left_or_whose_deadline_is_over() -> None:
    touchy = Touchy(0)
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=8)
    batcher.add_runner(touchy)
    waiting = [batcher.put(number) for number in range(4)]
    waiting += [batcher.put(number, deadline_s=now_s() + 1.5 * CALL_S) for number in range(4, 8)]
    await asyncio.sleep(0.5 * CALL_S)
    for each in waiting[1:4]:
        each.cancel()
    found = await outcomes(waiting)
    assert isinstance(found[0], BatchFunctionError)
    assert all(isinstance(each, DeadlineError) for each in found[4:])
    assert touchy.calls == [[4, 5, 6, 7, 0, 1, 2, 3], [4, 5], [0]]
    await batcher.close()


@in_virtual_time
async def test_where_all_fail_the_function_is_taken_to_be_broken_until_it_answers_again() -> None:
    touchy = Touchy(*range(4))
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(touchy)

    async def num_calls(*items: int) -> int:
        before = len(touchy.calls)
        await outcomes([batcher.submit(item) for item in items])
        return len(touchy.calls) - before

    assert await num_calls(0, 1, 2, 3) == 7
    assert await num_calls(0, 1, 2, 3) == 1
    assert await num_calls(0, 5, 6, 7) == 1
    assert await num_calls(5) == 1
    assert await num_calls(0, 5, 6, 7) == 5
    assert await num_calls(4, 5, 6, 0) == 5
    await batcher.close()


class Told(BatchListener):
    def __init__(self) -> None:
        self.finished: list[tuple[int, bool]] = []

    def batch_finished(self, runner: str, size: int, service_s: float, error: BaseException | None) -> None:
        self.finished.append((size, error is None))


@in_virtual_time
async def test_each_part_is_told_and_learned_as_the_batch_that_it_is() -> None:
    touchy, told = Touchy(0), Told()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4, listener=told)
    batcher.add_runner(touchy)
    for size in (1, 2, 4) * 10:
        batcher.model.observe(size, CALL_S)
    for _ in range(3):
        await outcomes([batcher.submit(number) for number in range(4)])
    assert told.finished == 3 * [(4, False), (2, False), (1, False), (1, True), (2, True)]
    assert batcher.stats.num_batches == 15
    assert batcher.stats.runners[0].num_items == 9
    assert batcher.model.predict_s(4) == pytest.approx(CALL_S, rel=1e-3)
    await batcher.close()


@in_virtual_time
async def test_that_parts_are_late_leaves_no_room_in_later_predictions() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
    batcher.add_runner(Touchy(0))
    for size in (1, 2, 4) * 10:
        batcher.model.observe(size, CALL_S)
    for _ in range(20):
        waiting = [batcher.put(number, deadline_s=now_s() + 1.0) for number in range(4)]
        assert (await outcomes(waiting))[1:] == [10, 20, 30]
    assert batcher._core.admission.lateness.room_s == 0.0
    await batcher.close()


@in_virtual_time
async def test_each_part_has_the_time_of_a_batch() -> None:
    touchy = Touchy(0)
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), run_timeout_s=1.5 * CALL_S)
    batcher.add_runner(touchy)
    found = await outcomes([batcher.submit(number) for number in range(8)])
    assert found[1:] == [10 * number for number in range(1, 8)]
    assert isinstance(found[0], BatchFunctionError)
    assert not isinstance(found[0], RunTimeoutError)
    await batcher.close()


@in_virtual_time
async def test_a_runner_that_is_lost_while_a_batch_is_run_in_parts_is_replaced_and_nobody_pays() -> None:
    num_calls = 0

    async def breaks(items: Sequence[int]) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        raise RunnerLostError("gone") if num_calls > 1 else RuntimeError("odd")

    async def echo(items: Sequence[int]) -> list[int]:
        return list(items)

    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    batcher.add_runner(breaks, replace=lambda: echo)
    assert await outcomes([batcher.submit(number) for number in range(4)]) == [0, 1, 2, 3]
    await batcher.close()


class Stubborn:
    """A batch function that raises an error of its own where it is cancelled, and keeps its inputs."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError as error:
            raise RuntimeError("was cancelled") from error
        return list(items)


@in_virtual_time
async def test_what_is_raised_for_a_cancellation_is_no_reason_to_run_anything_again() -> None:
    stubborn, touchy = Stubborn(), Touchy()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), run_timeout_s=1.0)
    batcher.add_runner(stubborn, replace=lambda: touchy)
    found = await outcomes([batcher.submit(number) for number in range(4)])
    assert all(isinstance(each, RunTimeoutError) for each in found)
    assert await batcher.submit(5) == 50
    assert touchy.calls == [[5]]
    await batcher.close()
    closing: Batcher[int, int] = Batcher(policy=Greedy())
    closing.add_runner(stubborn)
    waiting = [closing.put(number) for number in range(4)]
    await asyncio.sleep(0.1)
    began_s = now_s()
    await closing.close(drain=False)
    assert now_s() == began_s
    assert all(isinstance(each, Exception) for each in await outcomes(waiting))
    assert stubborn.calls == [[0, 1, 2, 3]] * 2


@in_virtual_time
async def test_a_runner_that_leaves_runs_the_parts_that_it_has_and_one_that_is_taken_away_leaves_them_to_others() -> (
    None
):
    for drain in (True, False):
        touchy, other = Touchy(0), Touchy(0)
        batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
        leaving = batcher.add_runner(touchy)
        waiting = [batcher.put(number) for number in range(4)]
        await asyncio.sleep(1.5 * CALL_S)
        batcher.add_runner(other)
        await leaving.remove(drain=drain)
        found = await outcomes(waiting)
        assert isinstance(found[0], BatchFunctionError)
        assert found[1:] == [10, 20, 30]
        assert len(touchy.calls) == (5 if drain else 2)
        assert bool(other.calls) is not drain
        await batcher.close()


@in_virtual_time
async def test_a_batcher_that_is_closed_answers_the_parts_or_fails_them() -> None:
    for drain in (True, False):
        batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=4)
        batcher.add_runner(Touchy(3))
        waiting = [batcher.put(number) for number in range(4)]
        await asyncio.sleep(1.5 * CALL_S)
        await batcher.close(drain=drain)
        assert all(each.done() for each in waiting)
        found = await outcomes(waiting)
        if drain:
            assert found[:3] == [0, 10, 20]
            assert isinstance(found[3], BatchFunctionError)
        else:
            assert all(isinstance(each, BatcherClosedError) for each in found)

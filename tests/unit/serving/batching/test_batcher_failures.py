"""Promises of a batcher when batch functions fail and callers leave, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.sim.event_loop import run
from orchestray.serving.batching import (
    Batcher,
    BatcherClosedError,
    BatchFunctionError,
    Fixed,
    Greedy,
    RunnerLostError,
    RunTimeoutError,
)
from support.batching import Model, in_virtual_time, now_s, outcomes

# -- errors ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_an_error_of_one_request_is_its_own() -> None:
    async def picky(items: Sequence[int]) -> list[int | Exception]:
        return [ValueError(f"no {item}") if item == 2 else item for item in items]

    batcher: Batcher[int, int] = Batcher()
    batcher.add_runner(picky)
    found = await outcomes([batcher.submit(number) for number in range(4)])
    assert found[0] == 0
    assert found[1] == 1
    assert found[3] == 3
    assert isinstance(found[2], ValueError)
    assert str(found[2]) == "no 2"
    await batcher.close()


async def raises(items: Sequence[int]) -> list[int]:
    raise RuntimeError("out of memory")


async def too_few(items: Sequence[int]) -> list[int]:
    return [1]


async def no_sequence(items: Sequence[int]) -> Any:
    return None


async def cancels_itself(items: Sequence[int]) -> list[int]:
    raise asyncio.CancelledError


class Table:
    """A table of three rows and two columns: its length counts the rows, and it iterates over the columns."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter(["outputs", "scores"])


class Unreadable(Table):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("gone")


async def is_a_table(items: Sequence[int]) -> Any:
    return Table()


async def is_not_to_be_read(items: Sequence[int]) -> Any:
    return Unreadable()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (is_a_table, "got 3 and returned 2"),
        (is_not_to_be_read, "raised RuntimeError"),
        (raises, "raised RuntimeError"),
        (too_few, "got 3 and returned 1"),
        (no_sequence, "got NoneType"),
        (cancels_itself, "cancelled itself"),
    ],
)
def test_a_batch_function_that_fails_as_a_whole_fails_its_batch_and_the_next_one_runs(
    function: Any, message: str
) -> None:
    async def main() -> None:
        broken = True

        async def sometimes(items: Sequence[int]) -> Any:
            return await function(items) if broken else list(items)

        batcher: Batcher[int, int] = Batcher(policy=Greedy(), isolate=False)
        batcher.add_runner(sometimes)
        found = await outcomes([batcher.submit(number) for number in range(3)])
        assert all(isinstance(error, BatchFunctionError) and message in str(error) for error in found)
        assert len({id(error) for error in found}) == 3
        broken = False
        assert await batcher.submit(7) == 7
        await batcher.close()

    run(main())


@in_virtual_time
async def test_an_answer_that_no_future_can_hold_fails_its_request_alone() -> None:
    async def stops(items: Sequence[int]) -> list[int | Exception]:
        return [StopIteration(), 5]

    batcher: Batcher[int, int] = Batcher()
    batcher.add_runner(stops)
    found = await outcomes([batcher.submit(0), batcher.submit(1)])
    assert isinstance(found[0], BatchFunctionError)
    assert found[1] == 5
    await batcher.close()


@in_virtual_time
async def test_a_function_that_hangs_and_ignores_cancellation_is_left_behind_and_replaced() -> None:
    release = asyncio.Event()

    async def hangs(items: Sequence[int]) -> list[int]:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return list(items)

    model = Model()
    batcher: Batcher[int, int] = Batcher(run_timeout_s=1.0)
    batcher.add_runner(hangs, replace=lambda: model)
    with pytest.raises(RunTimeoutError, match="within 1 s"):
        await batcher.submit(1)
    assert now_s() == pytest.approx(1.0)
    assert await batcher.submit(2) == 4
    release.set()
    await batcher.close()


@in_virtual_time
async def test_a_lost_runner_loses_no_request_and_a_second_loss_fails_it() -> None:
    async def dies(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(0.01)
        raise RunnerLostError("The process is gone.")

    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    batcher.add_runner(dies)
    waiting = [batcher.put(number) for number in range(3)]
    await asyncio.sleep(0.005)
    batcher.add_runner(model)
    assert await asyncio.gather(*waiting) == [0, 2, 4]
    assert batcher.stats.num_runners == 1
    await batcher.close()

    unlucky: Batcher[int, int] = Batcher()
    unlucky.add_runner(dies, replace=lambda: dies)
    with pytest.raises(BatchFunctionError, match="Two runners were lost"):
        await unlucky.submit(1)
    await unlucky.close()


# -- leaving -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_cancelled_request_leaves_at_once_and_never_reaches_the_model() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    batcher.add_runner(model)
    first = asyncio.ensure_future(batcher.submit(0))
    await asyncio.sleep(0.001)
    waiting = [asyncio.ensure_future(batcher.submit(number)) for number in range(1, 5)]
    await asyncio.sleep(0.001)
    assert batcher.stats.num_queued == 4
    waiting[1].cancel()
    assert batcher.stats.num_queued == 3
    await outcomes([first, *waiting])
    assert model.batches == [[0], [1, 3, 4]]
    await batcher.close()


def num_timers() -> int:
    """Return the number of timers of the loop that will still call a function."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


@in_virtual_time
async def test_ten_thousand_aborted_requests_leave_no_task_and_no_timer() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_queue=20_000)
    batcher.add_runner(model)
    first = asyncio.ensure_future(batcher.submit(-1))
    await asyncio.sleep(0.001)
    waiting = [asyncio.ensure_future(batcher.submit(number, deadline_s=1e4)) for number in range(10_000)]
    await asyncio.sleep(0.001)
    assert batcher.stats.num_queued == 10_000
    assert num_timers() >= 10_000
    for request in waiting:
        request.cancel()
    assert batcher.stats.num_queued == 0
    await outcomes([first, *waiting])
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert num_timers() == 0
    assert model.batches == [[-1]]
    await batcher.close()


@in_virtual_time
async def test_closing_drains_or_fails_what_waits_and_takes_nothing_more() -> None:
    for drain in (True, False):
        model = Model()
        batcher: Batcher[int, int] = Batcher(max_batch_size=2, policy=Fixed(1000.0))
        batcher.add_runner(model)
        waiting = [batcher.put(number) for number in range(5)]
        await asyncio.sleep(0.001)
        await batcher.close(drain=drain)
        found = await outcomes(waiting)
        if drain:
            assert found == [0, 2, 4, 6, 8]
        else:
            assert all(isinstance(error, BatcherClosedError) for error in found)
        with pytest.raises(BatcherClosedError):
            batcher.put(9)


@in_virtual_time
async def test_a_batch_taken_away_before_its_first_step_is_failed_or_handed_over() -> None:
    for close in (True, False):
        model = Model()
        batcher: Batcher[int, int] = Batcher(policy=Greedy())
        handle = batcher.add_runner(model)
        await asyncio.sleep(0)
        waiting = batcher.put(1)
        await asyncio.sleep(0)
        assert handle.flights
        for flight in handle.flights:
            assert flight.task is not None
            flight.task.cancel()
        if close:
            await batcher.close(drain=False)
            with pytest.raises(BatcherClosedError):
                await waiting
        else:
            batcher.add_runner(model)
            assert await waiting == 2
            await batcher.close()


@in_virtual_time
async def test_closing_without_a_runner_fails_what_waits() -> None:
    batcher: Batcher[int, int] = Batcher()
    waiting = batcher.put(1)
    await batcher.close()
    with pytest.raises(BatcherClosedError):
        await waiting


@in_virtual_time
async def test_a_removed_runner_finishes_its_batch_or_hands_it_over() -> None:
    for drain in (True, False):
        old, new = Model(), Model()
        batcher: Batcher[int, int] = Batcher(policy=Greedy())
        handle = batcher.add_runner(old)
        waiting = batcher.put(1)
        await asyncio.sleep(0.001)
        batcher.add_runner(new)
        await handle.remove(drain=drain)
        assert await waiting == 2
        assert new.batches == ([] if drain else [[1]])
        assert await batcher.submit(5) == 10
        assert [5] in new.batches
        await batcher.close()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_request_is_resolved_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)

    async def faulty(items: Sequence[int]) -> Any:
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.01]))
        fault = rng.randrange(8)
        if fault == 0:
            raise RuntimeError("fault")
        if fault == 1:
            raise RunnerLostError("fault")
        if fault == 2:
            await asyncio.get_running_loop().create_future()
        if fault == 3:
            return list(items)[1:]
        if fault == 4:
            return [ValueError("fault") for _ in items]
        return list(items)

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(max_batch_size=4, max_queue=16, run_timeout_s=0.05)
        for _ in range(2):
            batcher.add_runner(faulty, replace=lambda: faulty)
        waiting: list[asyncio.Task[int]] = []
        for number in range(60):
            await asyncio.sleep(rng.choice([0.0, 0.002, 0.02]))
            deadline_s = now_s() + rng.choice([0.001, 0.02, 1.0]) if rng.random() < 0.5 else None
            waiting.append(
                asyncio.ensure_future(batcher.submit(number, priority=rng.randrange(3), deadline_s=deadline_s))
            )
            if rng.random() < 0.1:
                rng.choice(waiting).cancel()
        await asyncio.sleep(rng.choice([0.0, 5.0]))
        await batcher.close(drain=rng.random() < 0.5)
        async with asyncio.timeout(0.001):  # in virtual time: nothing but what is ready now
            await outcomes(waiting)
        stats = batcher.stats
        assert (stats.num_queued, stats.num_in_flight) == (0, 0)

    run(main())


class Held:
    """An item that is seen to go."""


def test_a_batch_function_that_fails_leaves_nothing_that_is_to_be_collected() -> None:
    """Leave no cycles: a sample may have megabytes, and the collector comes seldom."""

    async def fail_some() -> list[Held | None]:
        batcher: Batcher[Held, int] = Batcher(policy=Greedy())
        batcher.add_runner(raises)
        items = [Held() for _ in range(3)]
        watched = [weakref.ref(item) for item in items]
        futures = [batcher.put(item) for item in items]
        items.clear()
        for future in futures:
            await asyncio.wait([future])
            assert isinstance(future.exception(), BatchFunctionError)
        futures.clear()
        del future
        await asyncio.sleep(0.001)
        found = [each() for each in watched]
        await batcher.close()
        return found

    gc.disable()
    try:
        assert run(fail_some()) == [None] * 3
    finally:
        gc.enable()

"""What a batcher promises about single requests, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching import (
    Adaptive,
    Batcher,
    BatcherClosedError,
    BatchFunctionError,
    BatchListener,
    DeadlineError,
    Fixed,
    Greedy,
    QueueFullError,
    RunnerLostError,
    RunTimeoutError,
    make_policy,
)
from orchestray.serving.batching.virtual_time import run

A_S, C_S = 0.020, 0.001


class Model:
    """Doubles numbers, in a + c b seconds; keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        await asyncio.sleep(A_S + C_S * len(items))
        return [2 * item for item in items]


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def outcomes(requests: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*requests, return_exceptions=True)


# -- answers -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    gaps_ms=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    max_batch_size=st.integers(1, 8),
    num_runners=st.integers(1, 3),
    policy=st.sampled_from([Greedy, Adaptive, lambda: Fixed(7.0)]),
)
def test_answers_are_those_of_the_unbatched_function_for_any_interleaving(
    gaps_ms: list[int], max_batch_size: int, num_runners: int, policy: Callable[[], Any]
) -> None:
    async def main() -> None:
        models = [Model() for _ in range(num_runners)]
        batcher: Batcher[int, int] = Batcher(policy=policy(), max_batch_size=max_batch_size)
        for model in models:
            batcher.add_runner(model)
        waiting = []
        for number, gap_ms in enumerate(gaps_ms):
            await asyncio.sleep(gap_ms / 1e3)
            waiting.append(asyncio.ensure_future(batcher.submit(number)))
        assert await asyncio.gather(*waiting) == [2 * number for number in range(len(gaps_ms))]
        seen = [item for model in models for batch in model.batches for item in batch]
        assert sorted(seen) == list(range(len(gaps_ms)))
        assert all(0 < len(batch) <= max_batch_size for model in models for batch in model.batches)
        await batcher.close()

    run(main())


@in_virtual_time
async def test_one_runner_answers_first_come_first_served_within_a_priority() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=3)
    batcher.add_runner(model)
    first = asyncio.ensure_future(batcher.submit(0))
    await asyncio.sleep(0.001)
    low = [batcher.put(number) for number in range(1, 6)]
    high = [batcher.put(number, priority=1) for number in range(10, 12)]
    await asyncio.gather(first, *low, *high)
    assert model.batches == [[0], [10, 11, 1], [2, 3, 4], [5]]
    await batcher.close()


@in_virtual_time
async def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=2)
    batcher.add_runner(model)
    first = batcher.put(0)
    await asyncio.sleep(0.001)
    rest = [batcher.put(n, deadline_s=at_s) for n, at_s in ((1, 9.0), (2, 5.0), (3, 7.0))]
    last = batcher.put(4)
    await asyncio.gather(first, *rest, last)
    assert model.batches == [[0], [2, 3], [1, 4]]
    await batcher.close()


@in_virtual_time
async def test_requests_of_one_moment_share_a_batch_on_an_idle_server() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    batcher.add_runner(model)
    await asyncio.gather(*(batcher.submit(n) for n in range(5)))
    assert model.batches == [[0, 1, 2, 3, 4]]
    await batcher.close()


@in_virtual_time
async def test_a_free_runner_takes_what_waits_at_once_unless_a_wait_was_chosen() -> None:
    """Work conserving: with `greedy` the time from arrival to start is 0 on a free runner; `fixed` adds its timeout."""
    for policy, expected_s in ((Greedy(), 0.0), (Fixed(5.0), 0.005)):
        queue_s: list[float] = []

        class Listener(BatchListener):
            def batch_started(self, runner: str, waited_s: Sequence[float], into: list[float] = queue_s) -> None:
                into.extend(waited_s)

        batcher: Batcher[int, int] = Batcher(policy=policy, listener=Listener())
        batcher.add_runner(Model())
        for number in range(3):
            await batcher.submit(number)
        assert queue_s == pytest.approx([expected_s] * 3, abs=1e-9)
        await batcher.close()


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


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "raised RuntimeError"),
        (too_few, "got 3 and returned 1"),
        (no_sequence, "got NoneType"),
        (cancels_itself, "cancelled itself"),
    ],
)
def test_a_batch_function_that_fails_fails_its_batch_and_the_next_one_runs(function: Any, message: str) -> None:
    async def main() -> None:
        broken = True

        async def sometimes(items: Sequence[int]) -> Any:
            return await function(items) if broken else list(items)

        batcher: Batcher[int, int] = Batcher(policy=Greedy())
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
    for request in waiting:
        request.cancel()
    assert batcher.stats.num_queued == 0
    await outcomes([first, *waiting])
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
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
        assert handle.task is not None
        handle.task.cancel()
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


# -- bounds ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_full_queue_refuses_with_a_time_to_retry_and_makes_room_for_higher_priorities() -> None:
    model = Model()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=2, max_queue=3)
    batcher.add_runner(model)
    for number in range(8):
        await asyncio.gather(*(batcher.submit(number) for _ in range(1 + number % 2)))
    running = batcher.put(0)
    await asyncio.sleep(0.001)
    waiting = [batcher.put(number) for number in range(1, 4)]
    with pytest.raises(QueueFullError) as refused:
        batcher.put(4)
    # What runs has 20 ms left, and three requests are one and a half batches of two.
    assert refused.value.retry_after_s == pytest.approx(0.020 + 1.5 * (A_S + 2 * C_S), rel=0.05)
    urgent = batcher.put(5, priority=1)
    with pytest.raises(QueueFullError):
        await waiting[-1]
    assert await asyncio.gather(running, *waiting[:2], urgent) == [0, 2, 4, 10]
    assert batcher.stats.num_shed == {"queue_full": 2}
    await batcher.close()


@in_virtual_time
async def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_a_time_to_retry() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=2)
    batcher.add_runner(Model())
    for number in range(6):
        await batcher.submit(number)
    began_s = now_s()
    with pytest.raises(DeadlineError) as refused:
        await batcher.submit(1, deadline_s=began_s + 0.005)
    assert now_s() == began_s
    assert refused.value.retry_after_s is not None
    queued = [batcher.put(number) for number in range(4)]
    with pytest.raises(DeadlineError) as behind:
        await batcher.submit(1, deadline_s=began_s + 0.030, priority=-1)
    assert behind.value.retry_after_s is not None
    assert behind.value.retry_after_s > refused.value.retry_after_s
    await asyncio.gather(*queued)
    await batcher.close()


@in_virtual_time
async def test_a_deadline_that_passes_while_running_says_so_and_one_in_the_queue_says_when_to_retry() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=1)

    async def slow(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(10.0)
        return list(items)

    batcher.add_runner(slow)
    running = asyncio.ensure_future(batcher.submit(1, deadline_s=now_s() + 1.0))
    queued = asyncio.ensure_future(batcher.submit(2, deadline_s=now_s() + 2.0))
    found = await outcomes([running, queued])
    assert now_s() == pytest.approx(2.0)
    assert [type(error) for error in found] == [DeadlineError, DeadlineError]
    assert found[0].retry_after_s is None
    assert found[1].retry_after_s > 0
    await batcher.close(drain=False)


@in_virtual_time
async def test_one_slow_batch_does_not_keep_out_deadlines_for_good() -> None:
    pause_s = [5.0]

    async def stumbles(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(pause_s.pop() if pause_s else 0.02)
        return list(items)

    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    batcher.add_runner(stumbles)
    answered = 0
    for number in range(60):
        try:
            answered += await batcher.submit(number, deadline_s=now_s() + (9.0 if number < 3 else 0.1)) == number
        except DeadlineError:
            await asyncio.sleep(0.05)
    assert answered >= 58
    await batcher.close()


@pytest.mark.parametrize(
    ("settings_", "named"),
    [({"max_batch_size": 0}, "max_batch_size"), ({"max_queue": 0}, "max_queue"), ({"objective": "best"}, "objective")],
)
def test_wrong_settings_are_named(settings_: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Batcher(**settings_)


def test_policies_are_made_by_name_and_say_what_they_lack() -> None:
    assert isinstance(make_policy("adaptive"), Adaptive)
    assert isinstance(make_policy("fixed", timeout_ms=3), Fixed)
    for name, timeout_ms in (("fixed", None), ("greedy", 1.0), ("eager", None), ("fixed", -1.0)):
        with pytest.raises(ConfigError):
            make_policy(name, timeout_ms=timeout_ms)

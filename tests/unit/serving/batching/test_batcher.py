"""Promises of a batcher about single requests, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.errors import ConfigError
from orchestray.platform.sim.event_loop import run
from orchestray.serving.batching import (
    Adaptive,
    Batcher,
    BatchListener,
    DeadlineError,
    Fixed,
    Greedy,
    QueueFullError,
    make_policy,
)
from support.batching import A_S, C_S, Model, in_virtual_time, now_s, outcomes

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


@in_virtual_time
async def test_a_batch_is_not_made_smaller_to_save_its_most_urgent_request() -> None:
    """Refuse the urgent request: alone it would be in time, but the others would wait for a batch more."""
    model, loop = Model(), asyncio.get_running_loop()
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=8)
    batcher.add_runner(model)
    for size in (1, 8) * 20:
        batcher.model.observe(size, A_S + C_S * size)
    urgent = batcher.put(0, deadline_s=loop.time() + A_S + 4 * C_S)
    others = [batcher.put(number) for number in range(1, 9)]
    with pytest.raises(DeadlineError):
        await urgent
    await asyncio.gather(*others)
    assert [len(batch) for batch in model.batches] == [8]
    await batcher.close()

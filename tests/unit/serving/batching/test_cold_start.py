"""Requests without a runner: those that cannot wait for one are refused, with the time when one will be there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from orchestray.serving.batching import Batcher, DeadlineError, Greedy
from support.batching import in_virtual_time, now_s


async def doubled(items: Sequence[int]) -> Sequence[int]:
    return [2 * item for item in items]


def without_runners(start_s: float | None) -> Batcher[int, int]:
    batcher: Batcher[int, int] = Batcher(policy=Greedy())
    if start_s is not None:
        batcher.expect_start(start_s)
    return batcher


@in_virtual_time
async def test_a_request_with_less_time_than_a_start_takes_is_refused_until_that_is_near() -> None:
    batcher = without_runners(8.0)
    for waited_s in (0.0, 5.0):
        await asyncio.sleep(waited_s)
        with pytest.raises(DeadlineError) as refused:
            await batcher.submit(1, deadline_s=now_s() + 2.0)
        assert refused.value.retry_after_s == pytest.approx(8.0 - waited_s, abs=0.01)
    await asyncio.sleep(2.0)
    waiting = asyncio.ensure_future(batcher.submit(3, deadline_s=now_s() + 2.0))  # one is due in a second
    await asyncio.sleep(1.0)
    batcher.add_runner(doubled)
    assert await waiting == 6
    await batcher.close()


@in_virtual_time
async def test_what_a_start_takes_is_measured_from_the_first_request_and_one_outage_is_not_expected_again() -> None:
    batcher = without_runners(None)
    measured = []
    for start_s in (4.0, 4000.0, 5.0):
        await asyncio.sleep(100)  # nobody asks: that is not a start
        waiting = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(start_s)
        runner = batcher.add_runner(doubled)
        assert await waiting == 2
        measured.append(batcher.stats.start_s)
        await runner.remove()
    assert measured == [4.0, 4.0, 5.0]
    await batcher.close()


@in_virtual_time
async def test_where_nothing_is_known_of_starts_a_request_waits() -> None:
    batcher = without_runners(None)
    waiting = asyncio.ensure_future(batcher.submit(1, deadline_s=now_s() + 2.0))
    await asyncio.sleep(1.0)
    batcher.add_runner(doubled)
    assert await waiting == 2
    await batcher.close()


@in_virtual_time
async def test_a_batcher_is_deserted_when_its_runners_are_gone_for_clearly_longer_than_a_start_takes() -> None:
    batcher = without_runners(20.0)
    runners = [batcher.add_runner(doubled) for _ in range(2)]
    await runners[0].remove()
    await asyncio.sleep(1000)
    assert not batcher.is_deserted  # there is another
    await runners[1].remove()
    await asyncio.sleep(39)
    assert not batcher.is_deserted  # one may be on its way
    await asyncio.sleep(2)
    assert batcher.is_deserted
    batcher.add_runner(doubled)
    assert not batcher.is_deserted
    await batcher.close()


@in_virtual_time
async def test_a_loss_that_is_made_good_in_seconds_is_no_desertion_however_short_a_start_is_known_to_be() -> None:
    batcher = without_runners(0.001)
    assert not batcher.is_deserted  # it is starting
    await batcher.add_runner(doubled).remove()
    await asyncio.sleep(5)
    assert not batcher.is_deserted
    await asyncio.sleep(1000)
    assert batcher.is_deserted
    await batcher.close()


@in_virtual_time
async def test_a_batcher_is_starting_while_requests_wait_for_a_first_runner_no_longer_than_it_may_take() -> None:
    batcher = without_runners(20.0)
    await batcher.add_runner(doubled).remove()
    await asyncio.sleep(1000)
    assert not batcher.is_starting  # nobody asks
    waiting = asyncio.ensure_future(batcher.submit(1))
    await asyncio.sleep(39)
    assert batcher.is_starting
    await asyncio.sleep(2)
    assert not batcher.is_starting  # it is late
    batcher.add_runner(doubled)
    assert await waiting == 2
    assert not batcher.is_starting
    await batcher.close()

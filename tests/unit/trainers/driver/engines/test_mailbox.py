"""The mailbox between the workers of all attempts and the driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from orchestray.platform.actors.member import Failure, Identity
from orchestray.platform.errors import TrainingError
from orchestray.platform.process.pulse import Sign
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.driver.engines.heartbeats import Beat
from orchestray.trainers.driver.engines.mailbox import Mailbox
from support.patience import PATIENCE_S

FAILURE = Failure(TrainingError("no"), "traceback")


async def entered(num_workers: int = 2) -> Mailbox:
    mailbox = Mailbox(num_workers)
    for rank in range(num_workers):
        assert await mailbox.enter("one", rank, Identity(100 + rank, "node"))
    return mailbox


async def kinds(mailbox: Mailbox) -> list[str]:
    return [kind for kind, _ in await mailbox.take(0)]


def test_messages_come_in_order_and_once() -> None:
    async def go() -> None:
        mailbox = await entered()
        await mailbox.put("one", [{"step": 1}])
        await mailbox.lost({1: "killed"})
        await mailbox.enter("two", 1, Identity(7, "node"))
        assert await kinds(mailbox) == ["attempt", "entered", "entered", "lines", "lost", "attempt", "entered"]
        assert await kinds(mailbox) == []

    asyncio.run(go())


def test_late_words_of_an_earlier_attempt_are_dropped() -> None:
    async def go() -> None:
        mailbox = await entered()
        await mailbox.enter("two", 0, Identity(7, "node"))
        await mailbox.take(0)
        await mailbox.put("one", [{"step": 9}])
        await mailbox.answer("one", 0, "outcome")
        assert await kinds(mailbox) == []
        assert not await mailbox.lost_touch("one", 1)

    asyncio.run(go())


def test_a_stop_and_the_step_on_disk_reach_whoever_leaves_lines() -> None:
    async def go() -> None:
        mailbox = await entered()
        assert await mailbox.put("one", []) == (False, 0)
        await mailbox.stop()
        await mailbox.take(17)
        assert await mailbox.put("one", []) == (True, 17)

    asyncio.run(go())


def test_a_worker_left_alone_hears_of_the_failure_that_comes_later_and_nobody_enters_again() -> None:
    async def go() -> None:
        mailbox = await entered()
        alone = asyncio.create_task(mailbox.lost_touch("one", 0))
        await asyncio.sleep(0)
        assert not alone.done()
        await mailbox.answer("one", 1, FAILURE)
        assert await alone
        assert not await mailbox.enter("two", 0, Identity(7, "node"))

    asyncio.run(go())


def explained(**others: Any) -> bool:
    """Return True if a worker left alone hears of a failure once the others have called these methods."""

    async def go() -> bool:
        mailbox = await entered(3)
        alone = asyncio.create_task(mailbox.lost_touch("one", 0, timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        for method, arguments in others.items():
            await getattr(mailbox, method)(*arguments)
        return await asyncio.wait_for(alone, PATIENCE_S)

    return asyncio.run(go())


def test_a_worker_left_alone_by_a_death_is_to_be_started_again() -> None:
    assert not explained(lost=({1: "killed"},))


def test_workers_that_all_lost_touch_are_to_be_started_again() -> None:
    assert not explained(answer=("one", 1, "outcome"), lost_touch=("one", 2))


def test_the_wait_for_an_explanation_ends() -> None:
    async def go() -> None:
        mailbox = await entered()
        assert not await mailbox.lost_touch("one", 0, timeout_s=0.01)

    asyncio.run(go())


def test_after_the_end_everybody_stops() -> None:
    async def go() -> None:
        mailbox = await entered()
        await mailbox.end()
        assert (await mailbox.put("one", []))[0]
        assert await mailbox.lost_touch("one", 0)
        assert not await mailbox.enter("two", 0, Identity(7, "node"))

    asyncio.run(go())


def test_the_newest_heartbeat_of_each_worker_is_kept_and_one_of_an_earlier_attempt_is_called_off() -> None:
    async def go() -> None:
        mailbox = await entered()
        sign = Sign(0.5, is_waiting=False, share_s=0.1)
        assert not await mailbox.beat("one", 0, is_built=False, sign=None)
        assert not await mailbox.beat("one", 0, is_built=True, sign=sign)
        assert await mailbox.heartbeats() == {0: Beat(2, is_built=True, sign=sign)}
        await mailbox.abort()
        assert await mailbox.beat("one", 1, is_built=True, sign=sign)
        await mailbox.enter("two", 0, Identity(7, "node"))
        assert await mailbox.heartbeats() == {}
        assert not await mailbox.beat("two", 0, is_built=False, sign=None)
        assert await mailbox.beat("one", 1, is_built=True, sign=sign), "nobody waits for it any more"

    asyncio.run(go())


def test_workers_that_stop_for_a_move_hear_that_they_go_on_once_all_have_stopped() -> None:
    interrupted = Outcome("interrupted", 7, 1.0, {}, 0, 0, 0, 1.0, [], [])

    async def go() -> None:
        mailbox = await entered()
        await mailbox.move()
        assert await mailbox.put("one", []) == (True, 0)
        first = asyncio.create_task(mailbox.answer("one", 0, interrupted))
        await asyncio.sleep(0)
        assert not first.done(), "the other may still be writing the checkpoint"
        assert await mailbox.answer("one", 1, interrupted)
        assert await first
        assert (await kinds(mailbox))[-4:] == ["moved", "silent", "moved", "silent"]
        await mailbox.moved()
        await mailbox.enter("two", 0, Identity(7, "node"))
        assert await mailbox.put("two", []) == (False, 0)

    asyncio.run(go())


def test_a_move_is_forgotten_once_the_run_is_to_stop_and_one_that_is_done_ends_the_run() -> None:
    finished = Outcome("finished", 9, 1.0, {}, 0, 0, 0, 1.0, [], [])

    async def go() -> None:
        mailbox = await entered()
        await mailbox.move()
        assert not await mailbox.answer("one", 0, finished)
        await mailbox.stop()
        await mailbox.move()
        assert not await mailbox.answer("one", 1, replace(finished, ended="interrupted"))
        assert (await kinds(mailbox))[-4:] == ["answer", "silent", "answer", "silent"]

    asyncio.run(go())

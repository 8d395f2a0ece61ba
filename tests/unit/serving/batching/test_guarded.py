"""Policies that fail, names of runners, and what a queue knows of those in it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from orchestray.platform.sim.event_loop import run
from orchestray.serving.batching import Batcher, Policy
from orchestray.serving.batching.policies import Opportunity
from orchestray.serving.batching.queue import Request, RequestQueue


class Failing(Policy):
    """A policy that raises in one of its methods, or returns what is not a number of seconds."""

    def __init__(self, where: str, wait_s: Any = 0.0) -> None:
        self._where = where
        self._wait_s = wait_s

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError(f"broken in {where}")

    def arrived(self, now_s: float) -> None:
        self._fail("arrived")

    def finished(self, now_s: float, num_items: int) -> None:
        self._fail("finished")

    def wait_s(self, opportunity: Opportunity) -> float:
        self._fail("wait_s")
        wait_s: float = self._wait_s
        return wait_s


@pytest.mark.parametrize(
    "policy",
    [
        Failing("arrived"),
        Failing("finished"),
        Failing("wait_s"),
        Failing("", math.inf),
        Failing("", math.nan),
        Failing("", "soon"),
    ],
)
def test_a_policy_that_fails_leaves_no_request_waiting_and_is_reported_once(policy: Policy) -> None:
    async def main() -> tuple[list[int], int]:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        async def double(items: Sequence[int]) -> list[int]:
            return [2 * item for item in items]

        batcher: Batcher[int, int] = Batcher(policy=policy, max_batch_size=4)
        batcher.add_runner(double)
        answers = [await asyncio.wait_for(batcher.submit(item), 1.0) for item in range(5)]
        return answers, len(reported)

    assert run(main()) == ([0, 2, 4, 6, 8], 1)


def test_runners_have_names_of_their_own_however_they_come_and_go() -> None:
    async def main() -> list[str]:
        async def same(items: Sequence[int]) -> Sequence[int]:
            return items

        batcher: Batcher[int, int] = Batcher()
        runners = [batcher.add_runner(same, name="runner-1"), batcher.add_runner(same), batcher.add_runner(same)]
        await runners[1].remove()
        runners.append(batcher.add_runner(same))
        return [runner.name for runner in runners]

    names = run(main())
    assert len(set(names)) == len(names) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_knows_its_oldest_and_its_first_deadline_whoever_leaves(seed: int) -> None:
    async def main() -> None:
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        queue: RequestQueue[int, int] = RequestQueue()
        waiting: list[Request[int, int]] = []
        for number in range(300):
            if waiting and draw.random() < 0.45:
                if draw.random() < 0.5:
                    leaving = draw.choice(waiting)
                    queue.remove(leaving)
                    waiting.remove(leaving)
                else:
                    for leaving in queue.pop(draw.randint(1, 4)):
                        waiting.remove(leaving)
            else:
                deadline_s = draw.choice([None, loop.time() + draw.random()])
                request: Request[int, int] = Request(
                    number,
                    loop=loop,
                    number=number,
                    priority=draw.randint(0, 2),
                    deadline_s=deadline_s,
                    on_cancel=lambda _: None,
                )
                queue.push(request)
                waiting.append(request)
            await asyncio.sleep(draw.random())
            assert queue.oldest_s == min((each.arrived_s for each in waiting), default=math.inf)
            assert queue.earliest_s == min((each.deadline_s for each in waiting), default=math.inf)

    run(main())


class Constant(Policy):
    """A policy that always returns the same wait."""

    def wait_s(self, opportunity: Opportunity) -> float:
        return 0.01


def test_what_a_policy_asked_to_wait_is_waited_once_unless_somebody_comes() -> None:
    async def main() -> list[float]:
        async def same(items: Sequence[int]) -> list[int]:
            return list(items)

        batcher: Batcher[int, int] = Batcher(policy=Constant(), max_batch_size=4)
        batcher.add_runner(same)
        loop = asyncio.get_running_loop()
        alone = asyncio.ensure_future(batcher.submit(0))
        await asyncio.wait_for(alone, 1.0)
        times_s = [loop.time()]
        first = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0.006)
        second = asyncio.ensure_future(batcher.submit(2))
        await asyncio.wait_for(asyncio.gather(first, second), 1.0)
        return [*times_s, loop.time()]

    assert run(main()) == pytest.approx([0.01, 0.026])

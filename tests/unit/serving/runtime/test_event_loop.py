"""The loop's clock: fine, and the one that its timers go by."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orchestray.serving.batching import Batcher
from orchestray.serving.runtime.event_loop import FineLoop

LOOPS = pytest.mark.parametrize("loop", [FineLoop, asyncio.new_event_loop])


def run(loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@LOOPS
def test_time_goes_on_within_a_callback(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        times = [clock() for _ in range(1000)]
        assert all(before <= after for before, after in itertools.pairwise(times))
        assert times[-1] - times[0] > 0.0
        assert min(after - before for before, after in itertools.pairwise(times) if after > before) < 0.001

    run(loop, main())


@LOOPS
def test_a_timer_is_called_when_the_clock_says_so(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        running = asyncio.get_running_loop()
        called = running.create_future()
        when_s = running.time() + 0.02
        running.call_at(when_s, lambda: called.set_result(running.time()))
        assert await called >= when_s - 0.002  # timers count whole milliseconds

    run(loop, main())


@LOOPS
def test_a_model_faster_than_a_millisecond_is_learned(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def busy(items: Any) -> list[int]:
        until_s = time.perf_counter() + 0.0004
        while time.perf_counter() < until_s:
            pass
        return list(items)

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher()
        batcher.add_runner(busy)
        for number in range(20):
            assert await batcher.submit(number) == number
        assert batcher.model.predict_s(1) >= 0.0003
        await batcher.close()

    run(loop, main())

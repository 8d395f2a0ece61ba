"""A model on a thread of the front's process: waited for while its batches are short, and never for long."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.in_process import _ModelThread, in_process
from support.http_endpoint import ROW_SUMS


class Gated:
    """A model that answers at once, or waits while `go` is not set."""

    num_in_flight = 1

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    @property
    def signature(self) -> Signature:
        return ROW_SUMS

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        self.go.wait(60)
        return [dict(sample) for sample in samples]

    def pin_threads(self) -> None:
        self.thread = threading.current_thread()


async def asked(batcher: Batcher[Any, Any], number: int) -> Any:
    return await batcher.submit({"x": number})


def test_a_batch_that_takes_longer_than_those_before_does_not_hold_up_the_event_loop() -> None:
    async def main() -> list[Any]:
        model, batcher = Gated(), Batcher[Any, Any](policy=Greedy())
        version = in_process(model, batcher)
        found = [await asked(batcher, number) for number in range(20)]
        model.go.clear()
        held = asyncio.ensure_future(asked(batcher, 20))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not held.done()
        model.go.set()  # by the event loop: it would never come to that
        found.append(await held)
        await version.close()
        return found

    assert asyncio.run(main()) == [{"x": number} for number in range(21)]


def test_what_the_model_raises_is_told_apart_from_a_long_batch() -> None:
    class Late(Gated):
        def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
            raise TimeoutError("mine")

    async def main() -> list[str]:
        batcher = Batcher[Any, Any](policy=Greedy())
        version = in_process(Late(), batcher)
        found = await asyncio.gather(*(asked(batcher, number) for number in range(3)), return_exceptions=True)
        found += await asyncio.gather(*(asked(batcher, number) for number in range(3)), return_exceptions=True)
        await version.close()
        return [type(each.__cause__ or each).__name__ for each in found]

    assert set(asyncio.run(main())) == {"TimeoutError"}


class JustTooLate(Future[Any]):
    """A future that ends between the end of the patience and the look at whether it has."""

    def result(self, timeout: float | None = None) -> Any:
        found = super().result()
        if timeout is not None:
            raise TimeoutError
        return found


class AtOnce(Executor):
    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = JustTooLate()
        future.set_result(function(*arguments, **named))
        return future


def test_a_batch_that_ends_as_the_patience_does_is_answered() -> None:
    thread = _ModelThread(Gated(), 8)
    thread.leave()
    thread._executor = AtOnce()  # type: ignore[assignment]
    thread._recent.append((1, 0.0))  # short: it is waited for
    assert asyncio.run(thread.run([{"x": 1}])) == [{"x": 1}]


def test_a_batch_that_raises_says_nothing_of_how_long_one_takes() -> None:
    class Broken(Gated):
        def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
            raise RuntimeError("at once")

    thread = _ModelThread(Broken(), 8)
    with pytest.raises(RuntimeError):
        asyncio.run(thread.run([{"x": 1}]))
    thread.leave()
    assert thread.pace_s == math.inf
    assert not thread._recent


def test_the_pace_is_of_a_full_batch_whatever_the_last_ones_were(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = _ModelThread(Gated(), 8)
    times_s = iter([10.0, 10.5, 20.0, 22.0, 30.0, 31.0, 40.0, 49.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times_s))
    thread._timed([{"x": 1}])
    assert thread.pace_s == 4.0
    thread._timed([{"x": 1}] * 8)
    assert thread.pace_s == 2.0
    for _ in range(2):
        thread._timed([{"x": 1}] * 8)
    assert thread.pace_s == 2.0  # not the 9 of a batch that had to wait
    thread.leave()

"""The peer's flaw, reproduced with its own class: what waits while a batch runs is sealed into slivers.

`ray.serve.batching._BatchQueue` of Ray 2.60 forms the next batch while one runs, and never lets it grow again. With a
model that does not block the loop, the batches stay small however many requests wait, and the queue collapses far
below capacity. Ours takes what waits when the runner is free.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray._common.signature import DUMMY_TYPE
from ray.serve import batching as peer

from lab.batching_simulation import Service, simulate
from lab.batching_theory import greedy_chain
from orchestray.loadtest.arrivals import poisson
from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Adaptive

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

A_S, C_S, MAX_BATCH_SIZE = 0.020, 0.0005, 32
SERVICE = Service(A_S, C_S)
RATE_PER_S, NUM_REQUESTS = 267, 400


class NoMetric:
    """A substitute for the peer's metrics, which need a running Ray."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def observe(self, *_: Any, **__: Any) -> None: ...

    def set(self, *_: Any, **__: Any) -> None: ...

    def inc(self, *_: Any, **__: Any) -> None: ...


def peer_latencies_s(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> tuple[list[float], list[int]]:
    """Return latencies and batch sizes of the peer's queue on a loop in virtual time, its clock the loop's."""
    for metric in ("Histogram", "Gauge", "Counter"):
        monkeypatch.setattr(peer, metric, NoMetric)
    context = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=10**6))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    latencies_s: list[float] = []
    sizes: list[int] = []

    async def handle(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return await SERVICE(items)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ticks = itertools.count()  # as a real clock, it has moved when it is read again: the peer spins until it has
        monkeypatch.setattr(peer, "time", SimpleNamespace(time=lambda: loop.time() + 1e-9 * next(ticks)))
        queue = peer._BatchQueue(MAX_BATCH_SIZE, timeout_s, 1, handle)
        rng = random.Random(1)
        arrivals, answers = poisson(RATE_PER_S, rng), []
        for number in range(NUM_REQUESTS):
            await asyncio.sleep(next(arrivals))
            answer: asyncio.Future[int] = loop.create_future()
            began_s = loop.time()
            answer.add_done_callback(lambda _, began_s=began_s: latencies_s.append(loop.time() - began_s))
            context_ = SimpleNamespace(multiplexed_model_id="")
            queue.put(peer._SingleRequest(None, [DUMMY_TYPE, number], answer, context_, None))  # type: ignore[arg-type]
            answers.append(answer)
        assert await asyncio.gather(*answers) == list(range(NUM_REQUESTS))
        assert queue._handle_batch_task is not None
        queue._handle_batch_task.cancel()
        await asyncio.wait({queue._handle_batch_task})

    event_loop.run(main())
    return latencies_s, sizes


def test_stock_serve_seals_batches_while_one_runs_and_collapses_where_ours_is_at_the_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use 30 % of capacity: its batches stay near 1 + rate T (here 3.7), so it serves less than is asked of it."""
    timeout_s = 0.010
    latencies_s, sizes = peer_latencies_s(monkeypatch, timeout_s)
    sealed = 1 + RATE_PER_S * timeout_s
    assert statistics.fmean(sizes) == pytest.approx(sealed, rel=0.25)
    assert sealed / (A_S + C_S * sealed) < RATE_PER_S  # what such batches can serve

    seconds = NUM_REQUESTS / RATE_PER_S
    ours = simulate(Adaptive(), SERVICE, lambda run: run.open_loop(poisson(RATE_PER_S, random.Random(1)), seconds))
    optimum_s = greedy_chain(RATE_PER_S, A_S, C_S, MAX_BATCH_SIZE)[0]
    assert ours.mean_s == pytest.approx(optimum_s, rel=0.05)
    half = len(latencies_s) // 2
    assert statistics.fmean(latencies_s[half:]) > 2 * statistics.fmean(latencies_s[:half])  # and it grows for ever
    assert statistics.fmean(latencies_s) > 3 * ours.mean_s

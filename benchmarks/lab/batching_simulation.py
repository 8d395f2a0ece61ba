"""Clients and a model in virtual time: whole workloads against a batcher, reproducible to the last digit."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestray.loadtest.arrivals import Arrivals
from orchestray.platform.sim import event_loop
from orchestray.serving.batching.batcher import Batcher
from orchestray.serving.batching.errors import BatchingError, DeadlineError
from orchestray.serving.batching.policies import Policy


@dataclass(frozen=True)
class Service:
    """A model that takes a + c b seconds for a batch of b; padded to `sizes`, where given."""

    a_s: float
    c_s: float
    sizes: tuple[int, ...] = ()

    def seconds(self, num_items: int) -> float:
        padded = next((size for size in self.sizes if size >= num_items), num_items)
        return self.a_s + self.c_s * padded

    async def __call__(self, items: Sequence[int]) -> list[int]:
        await asyncio.sleep(self.seconds(len(items)))
        return list(items)


@dataclass
class Trace:
    """Measurements: one entry a request, in order of completion, without those that came before `warm_up_s`."""

    warm_up_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    runner_items: list[int] = field(default_factory=list)
    """Number of requests that each runner has answered, those of the warm-up too."""
    num_refused: int = 0
    num_late: int = 0
    """Run, and not answered before the deadline."""
    num_offered: int = 0
    present_s: float = 0.0
    """Integral over time of the number of requests that the batcher says it has, waiting or in a batch."""
    in_system_s: float = 0.0
    """Sum over all requests, whatever became of them, of the time from each one's arrival until it left."""
    ended_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return sum(self.latencies_s) / len(self.latencies_s)

    def quantile_s(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Return the latencies of what finished in [begin_s, end_s)."""
        return [
            latency_s
            for latency_s, finished_s in zip(self.latencies_s, self.finished_s, strict=True)
            if begin_s <= finished_s < end_s
        ]


# -- how requests arrive -----------------------------------------------------------------------------------------------


def modulated(rates_per_s: Sequence[float], dwell_s: float, rng: random.Random) -> Arrivals:
    """Make a Markov-modulated Poisson process, whose rate changes after exponential times of mean `dwell_s`."""
    index, left_s, gap_s = 0, rng.expovariate(1.0 / dwell_s), 0.0
    while True:
        drawn_s = rng.expovariate(rates_per_s[index])
        if drawn_s <= left_s:
            left_s -= drawn_s
            yield gap_s + drawn_s
            gap_s = 0.0
        else:
            gap_s += left_s
            index, left_s = (index + 1) % len(rates_per_s), rng.expovariate(1.0 / dwell_s)


def steps(rates_per_s: Sequence[float], each_s: float, rng: random.Random) -> Arrivals:
    """Make Poisson arrivals whose rate is the next of `rates_per_s` every `each_s` seconds, until the last."""
    now_s = told_s = 0.0
    for index, rate_per_s in enumerate(rates_per_s):
        end_s = (index + 1) * each_s
        now_s = max(now_s, index * each_s)
        while (now_s := now_s + rng.expovariate(rate_per_s)) < end_s:
            yield now_s - told_s
            told_s = now_s


# -- the simulation ----------------------------------------------------------------------------------------------------


class Simulation:
    """Load of a batcher, which is measured; make and use it on a loop in virtual time.

    Measurements of requests and the batcher's own numbers obey Little's law (Little, "A proof for the queuing formula
    L = λW", 1961). The number present, over time, adds up to the times that requests are there. `close` asserts it.
    Over a run that begins and ends empty it holds exactly, whatever the arrivals and the order.
    """

    def __init__(self, batcher: Batcher[int, int], *, warm_up_s: float = 0.0, allow_s: float | None = None) -> None:
        self.batcher = batcher
        self.trace = Trace(warm_up_s)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, event_loop.VirtualTimeLoop), "it is for a loop in virtual time"
        loop.watch(self._integrate)
        self._loop = loop
        self._allow_s = allow_s
        self._num_taken = 0
        self._late_since_s: dict[int, float] = {}
        """By number, requests that have their answer, that it is too late, and whose batch still runs."""

    def offer(self, then: Callable[[], None] | None = None) -> None:
        """Send one request now; `then` is called when it is answered or refused."""
        began_s = self._loop.time()
        deadline_s = None if self._allow_s is None else began_s + self._allow_s
        if began_s >= self.trace.warm_up_s:
            self.trace.num_offered += 1
        try:
            answer = self.batcher.put(self._num_taken, deadline_s=deadline_s)
        except BatchingError:
            self.trace.num_refused += began_s >= self.trace.warm_up_s
            if then is not None:
                then()
            return
        number, self._num_taken = self._num_taken, self._num_taken + 1
        answer.add_done_callback(lambda done: self._finish(done, number, began_s, then))

    def run_by(self, service: Service) -> Callable[[Sequence[int]], Coroutine[Any, Any, list[int]]]:
        """Return the function of a runner of the batcher, which notes what it runs."""

        async def run(items: Sequence[int]) -> list[int]:
            if self._loop.time() >= self.trace.warm_up_s:
                self.trace.batch_sizes.append(len(items))
            try:
                return await service(items)
            finally:
                for item in self._late_since_s.keys() & set(items) if self._late_since_s else ():
                    self.trace.in_system_s += self._loop.time() - self._late_since_s.pop(item)

        return run

    async def close(self) -> None:
        """Have the batcher answer what it has, and hold what was measured against Little's law."""
        await self.batcher.close()
        await asyncio.sleep(0)  # the last answers arrive now
        self.trace.ended_s = self._loop.time()
        present_s, in_system_s = self.trace.present_s, self.trace.in_system_s
        assert math.isclose(present_s, in_system_s, rel_tol=1e-8, abs_tol=1e-8), (
            f"Little's law: the batcher had {present_s} requests x seconds, and its requests took {in_system_s} s"
        )

    def _finish(
        self, answer: asyncio.Future[int], number: int, began_s: float, then: Callable[[], None] | None
    ) -> None:
        now_s = self._loop.time()
        self.trace.in_system_s += now_s - began_s
        error = answer.exception()
        if isinstance(error, DeadlineError) and error.retry_after_s is None:
            self._late_since_s[number] = now_s
        if began_s >= self.trace.warm_up_s:
            if error is None:
                self.trace.latencies_s.append(now_s - began_s)
                self.trace.finished_s.append(now_s)
                self.trace.num_late += self._allow_s is not None and now_s - began_s > self._allow_s + 1e-9
            elif isinstance(error, DeadlineError) and error.retry_after_s is None:
                self.trace.num_late += 1
            else:
                self.trace.num_refused += 1
        if then is not None:
            then()

    def _integrate(self, seconds: float) -> None:
        stats = self.batcher.stats
        self.trace.present_s += (stats.num_queued + stats.num_in_flight) * seconds

    async def open_loop(self, arrivals: Arrivals, until_s: float) -> None:
        """Offer requests at times of their own, whatever becomes of those before."""
        for gap_s in arrivals:
            await asyncio.sleep(gap_s)
            if self._loop.time() >= until_s:
                break
            self.offer()

    async def closed_loop(self, num_clients: int, delay_s: Callable[[], float], until_s: float) -> None:
        """Run clients that send the next request `delay_s()` after the answer to the last."""
        begin_s = self._loop.time()

        def again() -> None:
            if self._loop.time() < until_s:
                self._loop.call_later(delay_s(), self.offer, again)

        for _ in range(num_clients):
            self._loop.call_later(delay_s(), self.offer, again)
        await asyncio.sleep(until_s - begin_s)


def simulate(
    policy: Policy,
    service: Service,
    drive: Callable[[Simulation], Coroutine[Any, Any, None]],
    *,
    max_batch_size: int = 32,
    warm_up_s: float = 0.0,
    allow_s: float | None = None,
    num_runners: int = 1,
    objective: str = "mean",
) -> Trace:
    """Run `drive(simulation)`, a coroutine that offers requests, against a fresh batcher; returns what was measured.

    Every run is held against Little's law: see `Simulation`.
    """

    async def main() -> Trace:
        batcher: Batcher[int, int] = Batcher(policy=policy, max_batch_size=max_batch_size, objective=objective)
        simulation = Simulation(batcher, warm_up_s=warm_up_s, allow_s=allow_s)
        runners = [batcher.add_runner(simulation.run_by(service)) for _ in range(num_runners)]
        await drive(simulation)
        await simulation.close()
        simulation.trace.runner_items = [runner.num_items for runner in runners]
        return simulation.trace

    return event_loop.run(main())

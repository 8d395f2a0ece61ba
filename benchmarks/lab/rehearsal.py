"""A pool of replicas under a recorded load, in virtual time: what a number of replicas, or a scaling goal, would cost.

The batcher, the meter of the load and the policy are those that serve; only the model and the clock are not real.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lab.batching_simulation import Service, Simulation, Trace
from orchestray.loadtest.arrivals import Arrivals
from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Batcher, Greedy, RunnerHandle
from orchestray.serving.batching.runner import RunFunction
from orchestray.serving.replicas.autoscaler import REPORT_EVERY_S, LoadMeter
from orchestray.serving.replicas.scaling import ScalingGoal, wanted_replicas


@dataclass
class Rehearsal:
    """Results of a rehearsal."""

    trace: Trace
    """Measurements of the requests."""
    replica_s: float = 0.0
    """Seconds that replicas were there or starting, in all: what they cost."""
    counts: list[tuple[float, int]] = field(default_factory=list)
    """The number of replicas, there or starting, from each moment (seconds) on."""
    ended_s: float = 0.0
    """Time at which the last replica was counted."""

    def most(self, begin_s: float, end_s: float) -> int:
        """Return the largest number of replicas in [begin_s, end_s)."""
        before = [count for since_s, count in self.counts if since_s <= begin_s][-1:]
        return max(before + [count for since_s, count in self.counts if begin_s <= since_s < end_s])

    @property
    def lifetimes_s(self) -> list[float]:
        """Seconds that each replica was there or starting, the newest going first; they add up to `replica_s`."""
        began_s: list[float] = []
        found = []
        counted = [(since_s, count) for since_s, count in self.counts if since_s < self.ended_s]
        for since_s, count in [*counted, (self.ended_s, 0)]:
            while len(began_s) > count:
                found.append(since_s - began_s.pop())
            began_s += [since_s] * (count - len(began_s))
        return found


def rehearse(
    arrivals: Arrivals,
    seconds: float,
    service: Service,
    *,
    goal: ScalingGoal | None = None,
    num_replicas: int = 1,
    max_batch_size: int = 32,
    start_s: float = 3.0,
    down_after_s: float = 10.0,
) -> Rehearsal:
    """Offer the arrivals to a pool of replicas.

    Args:
        arrivals: seconds between one request and the next.
        seconds: after which no more are offered.
        service: what a batch takes.
        goal: of autoscaling; None: the number stays.
        num_replicas: at the beginning.
        max_batch_size: largest batch.
        start_s: what a replica takes to start, before it answers.
        down_after_s: for how long there must be too many before one goes.
    """

    async def main() -> Rehearsal:
        batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=max_batch_size, max_queue=1_000_000)
        simulation = Simulation(batcher)
        fleet = _Fleet(batcher, simulation.run_by(service), start_s)
        fleet.begin_with(num_replicas)
        following = None if goal is None else asyncio.create_task(fleet.follow(goal, down_after_s))
        await simulation.open_loop(arrivals, seconds)
        await asyncio.sleep(max(0.0, seconds - asyncio.get_running_loop().time()))
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        ended_s = asyncio.get_running_loop().time()
        fleet.begin_with(max(1, fleet.num_replicas))  # somebody answers what still waits; nobody counts it
        await simulation.close()
        return Rehearsal(simulation.trace, fleet.replica_seconds(ended_s), fleet.counts, ended_s)

    return event_loop.run(main())


class _Fleet:
    def __init__(self, batcher: Batcher[int, int], run: RunFunction[int, int], start_s: float) -> None:
        self._batcher = batcher
        self._run = run
        self._start_s = start_s
        self._runners: list[RunnerHandle[int, int]] = []
        self._starting: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self.counts: list[tuple[float, int]] = []

    @property
    def num_replicas(self) -> int:
        return len(self._runners) + len(self._starting)

    def begin_with(self, count: int) -> None:
        """Begin with replicas that are there at once."""
        while len(self._runners) < count:
            self._runners.append(self._batcher.add_runner(self._run))
        self._count()

    async def follow(self, goal: ScalingGoal, down_after_s: float) -> None:
        """Do what the policy says, as Ray Serve does."""
        meter, too_many_since_s = LoadMeter(self._batcher, self._loop.time()), None
        while True:
            wanted = wanted_replicas(meter.measure(self._loop.time()), self.num_replicas, goal)
            if wanted < self.num_replicas:
                now_s = self._loop.time()
                too_many_since_s = now_s if too_many_since_s is None else too_many_since_s
                if wanted == 0 or now_s - too_many_since_s >= down_after_s:
                    await self._shrink(wanted)
                    too_many_since_s = None
            else:
                too_many_since_s = None
                self._grow(wanted)
            await asyncio.sleep(REPORT_EVERY_S)

    def _grow(self, count: int) -> None:
        while self.num_replicas < count:
            self._starting.append(asyncio.create_task(self._start()))
        self._count()

    async def _start(self) -> None:
        await asyncio.sleep(self._start_s)
        self._starting.pop(0)
        self._runners.append(self._batcher.add_runner(self._run))

    async def _shrink(self, count: int) -> None:
        while self._starting and self.num_replicas > count:
            self._starting.pop().cancel()
        while self.num_replicas > count:
            await self._runners.pop().remove()
        self._count()

    def _count(self) -> None:
        if not self.counts or self.counts[-1][1] != self.num_replicas:
            self.counts.append((self._loop.time(), self.num_replicas))

    def replica_seconds(self, ended_s: float) -> float:
        """Return the area under the number of replicas until `ended_s`."""
        moments = [since_s for since_s, _ in self.counts if since_s < ended_s] + [ended_s]
        counts = [count for since_s, count in self.counts if since_s < ended_s]
        return sum(count * (after - before) for count, before, after in zip(counts, moments, moments[1:], strict=False))

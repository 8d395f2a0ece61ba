"""`waited_s` of each worker is the time it stood still for the others, whatever they exchange and however."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.comm.collective import Collective
from orchestray.platform.process.wait_clock import Waiting
from orchestray.trainers.core.faults import FaultPlan, Faults
from orchestray.trainers.loop import step_log
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.loop.step_log import UsageSum
from support.layouts import layout_settings
from support.threads import TIMEOUT_S, run_replicas
from support.training import digits, stream_of

STEPS = 2
DELAY_S = 0.5


class Time:
    """A clock that goes on only while a worker is late on purpose, and the other waits for it within its training."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waits, self._trains = Counter[int](), Counter[int]()
        self._changed = threading.Condition()

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        with self._during(self._waits, rank):
            yield

    @contextmanager
    def trains(self, rank: int) -> Iterator[None]:
        with self._during(self._trains, rank):
            yield

    def is_late(self, rank: int, late_s: float) -> None:
        other = 1 - rank
        with self._changed:
            # What they agree on before they train is waited for, too, and may just be coming to its end.
            waits = self._changed.wait_for(lambda: self._waits[other] > 0 and self._trains[other] > 0, TIMEOUT_S)
            assert waits, "nobody waits"
            self.now_s += late_s

    @contextmanager
    def _during(self, counts: Counter[int], rank: int) -> Iterator[None]:
        with self._changed:
            counts[rank] += 1
            self._changed.notify_all()
        yield
        with self._changed:
            counts[rank] -= 1


class WaitingFor(Waiting):
    """Waiting of the worker of this rank."""

    def __init__(self, time: Time, rank: int) -> None:
        super().__init__(lambda: time.now_s)
        self._time, self._rank = time, rank

    @contextmanager
    def during(self) -> Iterator[None]:
        with super().during(), self._time.waits(self._rank):
            yield


class UsageOf(UsageSum):
    """Usage of the worker that the clock in `trains` counts."""

    trains: Callable[[], AbstractContextManager[None]]

    @contextmanager
    def training(self, waiting: Waiting) -> Iterator[None]:
        with self.trains(), super().training(waiting):
            yield


EXCHANGES: dict[str, dict[str, Any]] = {
    "native": {"type": "allreduce"},
    "in two buckets": {"type": "allreduce", "bucket_mb": 0.001},
    "ring": {"type": "allreduce", "algorithm": "ring"},
    "optimizer": {"type": "allreduce", "shard": "optimizer"},
    "parameters": {"type": "allreduce", "shard": "parameters"},
    "factors": {"type": "allreduce", "factors": "always"},
    "gossip": {"type": "gossip"},
    "averaging": {"type": "averaging", "every": 2},
    "at the end": {"type": "averaging", "every": "end"},
    "elastic": {"type": "elastic_averaging", "every": 2},
    "elastic, asynchronous": {"type": "elastic_averaging", "every": 1, "consistency": "asynchronous"},
    "independent": {"type": "independent"},
}


# In all but these no worker does what another does not.
@pytest.mark.parametrize(
    ("kind", "late"),
    [*((kind, 0) for kind in EXCHANGES), ("native", 1), ("optimizer", 1), ("elastic, asynchronous", 1)],
)
def test_a_worker_waits_as_long_as_the_other_is_late_and_that_one_never(kind: str, late: int) -> None:
    exchange = EXCHANGES[kind]
    told = _train({"data": 2}, exchange, late)
    assert [worker["waited_s"] for worker in told] == [DELAY_S * STEPS * (rank != late) for rank in (0, 1)]
    copies = 2 if exchange["type"] == "independent" else 1
    assert [worker["shares"] for worker in told] == [STEPS, STEPS]
    assert sum(worker["samples"] for worker in told) == STEPS * 24 * copies


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("network", [{"tensor": 2}, {"pipeline": 2}])
def test_workers_that_hold_a_model_together_wait_for_each_other(network: dict[str, Any], late: int) -> None:
    told = _train(network, {"type": "allreduce"}, late)
    assert [worker["waited_s"] for worker in told] == [DELAY_S * STEPS * (rank != late) for rank in (0, 1)]
    assert [worker["samples"] for worker in told] == [STEPS * 24, STEPS * 24]


def _train(network: dict[str, Any], exchange: dict[str, Any], late: int) -> list[dict[str, Any]]:
    """Train with two workers, one of which takes `DELAY_S` longer for each step; return what is reported of both."""
    fault = {"kind": "delay", "role": "worker", "rank": late, "at_step": 1, "factor": DELAY_S}
    settings = replace(layout_settings(network, exchange, steps=STEPS), faults=(fault,))
    tasks = [digits(hidden=[8], validation_fraction=0.02) for _ in range(2)]
    replicas = [Replica(task, settings, stream_of(task, settings)) for task in tasks]
    clock = Time()

    def run(world: Collective) -> list[dict[str, Any]]:
        rank = world.rank
        world.waiting = WaitingFor(clock, rank)
        replica = replicas[rank]
        replica.connect(world)
        replica.log.usage = usage = UsageOf(rank)
        usage.trains = partial(clock.trains, rank)
        plan = FaultPlan.of(settings.faults, "worker", rank)
        replica.faults = Faults(plan, sleep=lambda _: clock.is_late(rank, DELAY_S))
        return [worker["worker"] for worker in replica.run(time.time()).usage]

    first, second = run_replicas(2, run)
    assert first == second
    return first


def test_seconds_without_samples_are_neither_busy_nor_waited_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    def reading() -> Iterator[Any]:
        for seconds in (3.0, 0.0, 0.25):
            takes(seconds)
            yield object()

    monkeypatch.setattr(step_log, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    usage, waiting = UsageSum(), Waiting(lambda: now[0])
    shares = usage.awaited(reading())
    for _ in range(3):
        with usage.training(waiting):
            next(shares)
            takes(1.0)
            with waiting.during():
                takes(0.5)
    assert next(shares, None) is None
    told = usage.summary()["worker"]
    assert (told["starved_s"], told["busy_s"], told["waited_s"]) == (3.25, 3.0, 1.5)

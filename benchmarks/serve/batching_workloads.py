"""Workloads in virtual time on which policies of batching are compared; deterministic, the same for every policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SERVICES = {"20 ms + 0.5 ms b": (0.020, 0.0005), "5 ms + 0.2 ms b": (0.005, 0.0002), "3 ms + 3 ms b": (0.003, 0.003)}
MAX_BATCH_SIZE = 32
TIMEOUTS_MS = (0, 1, 2, 3, 5, 7, 10, 20, 50)
_WARM_UP = 0.1


@dataclass(frozen=True)
class Workload:
    """Way in which requests come: `drive` offers them to a simulation for `seconds`."""

    name: str
    seconds: float
    drive: Callable[[Any, int], Any]


def workloads(a_s: float, c_s: float, num_requests: int) -> list[Workload]:
    """Return what is offered to a model of these service times, about `num_requests` each."""
    from lab import batching_simulation as sim
    from orchestray.loadtest.arrivals import bursts, poisson

    capacity = MAX_BATCH_SIZE / (a_s + c_s * MAX_BATCH_SIZE)

    def opened(name: str, rate_per_s: float, make: Callable[[float, random.Random], Any]) -> Workload:
        seconds = num_requests / rate_per_s
        return Workload(name, seconds, lambda run, seed: run.open_loop(make(rate_per_s, random.Random(seed)), seconds))

    def closed(name: str, num_clients: int, delay_s: Callable[[random.Random], float], mean_delay_s: float) -> Workload:
        batch = min(num_clients, MAX_BATCH_SIZE)
        seconds = num_requests / (batch / (a_s + c_s * batch + mean_delay_s))

        def drive(run: Any, seed: int) -> Any:
            rng = random.Random(seed)
            return run.closed_loop(num_clients, lambda: delay_s(rng), seconds)

        return Workload(name, seconds, drive)

    def network_s(rng: random.Random) -> float:
        return 0.0005 + rng.expovariate(1 / 0.0005)

    made = [closed(f"closed, {n} clients", n, network_s, 0.001) for n in (1, 2, 4, 8, 16, 32, 64)]
    made.append(closed("closed, 16 clients that think", 16, lambda rng: rng.expovariate(1 / (2 * a_s)), 2 * a_s))
    made += [opened(f"Poisson, {load:.0%}", load * capacity, poisson) for load in (0.1, 0.5, 0.9)]
    made += [
        opened(f"bursts of 8, {load:.0%}", load * capacity, lambda rate, rng: bursts(rate, 8, 0.0005, rng))
        for load in (0.1, 0.5)
    ]
    made.append(
        opened(
            "modulated, 10 to 70 %",
            0.4 * capacity,
            lambda _, rng: sim.modulated((0.1 * capacity, 0.7 * capacity), 50 * a_s, rng),
        )
    )
    each_s = num_requests / (0.3 * capacity) / 3
    made.append(
        opened(
            "rate steps, 10, 60, 20 %",
            0.3 * capacity,
            lambda _, rng: sim.steps((0.1 * capacity, 0.6 * capacity, 0.2 * capacity), each_s, rng),
        )
    )
    return made


def measure(policy: Any, service: tuple[float, float], workload: Workload, seed: int, **settings: Any) -> Any:
    """Return the trace of a workload under a policy; the first tenth of the time is not counted."""
    from lab.batching_simulation import Service, simulate

    return simulate(
        policy,
        Service(*service),
        lambda run: workload.drive(run, seed),
        max_batch_size=MAX_BATCH_SIZE,
        warm_up_s=_WARM_UP * workload.seconds,
        **settings,
    )

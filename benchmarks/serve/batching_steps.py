"""Loads that change at once, in turn and without retuning: each phase against its best fixed timeout; in virtual time.

Poisson arrivals of 20, 500 and 50 a second and then 16 closed-loop clients; and closed-loop clients in all four.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import benchmark
from serve import batching_workloads as workloads

_SERVICE = "20 ms + 0.5 ms b"
_PHASE_S, _PHASE_QUICK_S = 12.0, 2.0
_SETTLE_S, _SETTLE_QUICK_S = 1.0, 0.5
_SEEDS, _SEEDS_QUICK = (1, 2, 3, 4, 5), (1,)
_LIMIT = 1.08


@dataclass(frozen=True)
class _Phase:
    """A load: requests a second at times of their own, or clients that each wait for their answers."""

    rate_per_s: float = 0.0
    num_clients: int = 0

    def __str__(self) -> str:
        return f"{self.num_clients} clients" if self.num_clients else f"{self.rate_per_s:g}/s"

    async def drive(self, run: Any, rng: random.Random, until_s: float) -> None:
        from orchestray.loadtest.arrivals import poisson

        if self.num_clients:
            await run.closed_loop(self.num_clients, lambda: 0.0005 + rng.expovariate(2000.0), until_s)
        else:
            await run.open_loop(poisson(self.rate_per_s, rng), until_s)


_SEQUENCES = {
    "rates, then clients": (
        _Phase(rate_per_s=20),
        _Phase(rate_per_s=500),
        _Phase(rate_per_s=50),
        _Phase(num_clients=16),
    ),
    "clients": tuple(_Phase(num_clients=num_clients) for num_clients in (20, 500, 50, 16)),
}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    phase_s = _PHASE_QUICK_S if options.quick else _PHASE_S
    settle_s = _SETTLE_QUICK_S if options.quick else _SETTLE_S
    seeds = _SEEDS_QUICK if options.quick else _SEEDS
    report.settings = {"service": _SERVICE, "max_batch_size": workloads.MAX_BATCH_SIZE, "seconds a phase": phase_s}
    report.settings |= {"seconds left out": settle_s, "seeds": seeds}
    rows: list[list[str]] = []
    for name, phases in _SEQUENCES.items():
        rows += _sequence(report, name, phases, seeds, phase_s, settle_s)
    report.table(["in turn", "phase", "mean, ms", "of the best timeout of the phase", "ratio"], rows)
    report.notes += [
        (
            f"The first {settle_s:g} s of a phase are left out, for every policy: there is no retuning. Clients come "
            "back 0.5 ms + an exponential 0.5 ms after an answer."
        ),
        (
            f"Means over {len(seeds)} seeds, whose arrivals are the same for every policy; the best timeout is that of "
            f"{', '.join(map(str, workloads.TIMEOUTS_MS))} ms with the lowest mean in the phase."
        ),
    ]


def _sequence(
    report: benchmark.Report, name: str, phases: Sequence[_Phase], seeds: Sequence[int], phase_s: float, settle_s: float
) -> list[list[str]]:
    """Return the rows of the table for phases in turn."""
    from orchestray.serving.batching import Adaptive, Fixed

    benchmark.say(f"{name}: adaptive")
    ours = [_phases_ms(Adaptive(), phases, seed, phase_s, settle_s) for seed in seeds]
    peers: dict[int, list[float]] = {}
    for timeout_ms in workloads.TIMEOUTS_MS:
        benchmark.say(f"{name}: timeout {timeout_ms} ms")
        found = [_phases_ms(Fixed(timeout_ms), phases, seed, phase_s, settle_s) for seed in seeds]
        peers[timeout_ms] = [statistics.fmean(of_seeds) for of_seeds in zip(*found, strict=True)]
    rows = []
    for index, phase in enumerate(phases):
        best = min(peers, key=lambda timeout_ms: peers[timeout_ms][index])
        best_ms = peers[best][index]
        mean_ms = statistics.fmean(one[index] for one in ours)
        at = f"{name}: phase {index + 1}, {phase}"
        report.add(f"{at}: mean latency", "ms", [one[index] for one in ours])
        report.goal(f"{at}: mean latency over that of the best timeout", mean_ms / best_ms, _LIMIT)
        rows.append([name, str(phase), f"{mean_ms:.2f}", f"{best_ms:.2f} ({best} ms)", f"{mean_ms / best_ms:.3f}"])
    return rows


def _phases_ms(policy: Any, phases: Sequence[_Phase], seed: int, phase_s: float, settle_s: float) -> list[float]:
    """Return the mean latency of each phase, without its beginning."""
    from lab.batching_simulation import Service, simulate

    # Numbers of their own for each phase: what a policy did in one changes nothing of what arrives in the next.
    rngs = [random.Random(f"{seed} {index}") for index in range(len(phases))]

    async def drive(run: Any) -> None:
        for index, phase in enumerate(phases):
            await phase.drive(run, rngs[index], (index + 1) * phase_s)

    trace = simulate(policy, Service(*workloads.SERVICES[_SERVICE]), drive, max_batch_size=workloads.MAX_BATCH_SIZE)
    return [
        statistics.fmean(trace.between(index * phase_s + settle_s, (index + 1) * phase_s)) * 1e3
        for index in range(len(phases))
    ]


if __name__ == "__main__":
    benchmark.run(
        "batching_steps",
        "Loads that change at once, without retuning: each phase against its best fixed timeout.",
        measure,
    )

"""Closed-loop clients, 20, 500, 50 and 16 in turn: each phase against its best fixed timeout; in virtual time."""

from __future__ import annotations

import random
import statistics
from typing import Any

import batching_workloads as workloads
import harness

_SERVICE = "20 ms + 0.5 ms b"
_NUM_CLIENTS = (20, 500, 50, 16)
_PHASE_S, _PHASE_QUICK_S = 4.0, 2.0
_SETTLE = 0.25
_LIMIT = 1.08


def measure(report: harness.Report, options: harness.Options) -> None:
    from orchestray.serving.batching import Adaptive, Fixed

    phase_s = _PHASE_QUICK_S if options.quick else _PHASE_S
    report.settings = {"service": _SERVICE, "max_batch_size": workloads.MAX_BATCH_SIZE, "seconds a phase": phase_s}
    harness.say("adaptive")
    ours = _phases_ms(Adaptive(), phase_s)
    peers: dict[int, list[float]] = {}
    for timeout_ms in workloads.TIMEOUTS_MS:
        harness.say(f"timeout {timeout_ms} ms")
        peers[timeout_ms] = _phases_ms(Fixed(timeout_ms), phase_s)
    rows = []
    for index, num_clients in enumerate(_NUM_CLIENTS):
        best = min(peers, key=lambda timeout_ms: peers[timeout_ms][index])
        ratio = ours[index] / peers[best][index]
        report.add(f"phase {index + 1}, {num_clients} clients, mean latency", "ms", [ours[index]])
        report.goal(f"{num_clients} clients: mean latency over that of the best timeout", ratio, _LIMIT)
        rows.append([f"{num_clients}", f"{ours[index]:.2f}", f"{peers[best][index]:.2f} ({best} ms)", f"{ratio:.3f}"])
    report.table(["clients", "mean, ms", "of the best timeout of the phase", "ratio"], rows)
    report.notes.append(
        f"The first {_SETTLE:.0%} of a phase ({_SETTLE * phase_s:g} s) are left out, for every policy: there is no "
        "retuning. Clients come back 0.5 ms + an exponential 0.5 ms after an answer."
    )


def _phases_ms(policy: Any, phase_s: float) -> list[float]:
    """Mean latency of each phase, without its beginning."""
    from orchestray.serving.batching.simulation import Service, simulate

    rng = random.Random(1)

    async def drive(run: Any) -> None:
        for index, num_clients in enumerate(_NUM_CLIENTS):
            await run.closed_loop(num_clients, lambda: 0.0005 + rng.expovariate(2000.0), (index + 1) * phase_s)

    trace = simulate(policy, Service(*workloads.SERVICES[_SERVICE]), drive, max_batch_size=workloads.MAX_BATCH_SIZE)
    return [
        statistics.fmean(trace.between((index + _SETTLE) * phase_s, (index + 1) * phase_s)) * 1e3
        for index in range(len(_NUM_CLIENTS))
    ]


if __name__ == "__main__":
    harness.run(
        "batching_steps",
        "Closed-loop clients, 20, 500, 50 and 16 of them in turn: each phase against its best fixed timeout.",
        measure,
    )

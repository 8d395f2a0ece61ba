"""Goodput above capacity with an objective of 100 ms: requests that cannot be in time are refused; in virtual time."""

from __future__ import annotations

import random
from typing import Any

import harness

_A_S, _C_S, _MAX_BATCH_SIZE = 0.020, 0.0005, 32
_ALLOW_S = 0.100
_LOADS = (0.95, 1.2, 2.0, 4.0)
_SECONDS, _SECONDS_QUICK, _WARM_UP_S = 8.0, 2.0, 1.0
_GOODPUT, _LATE = 0.97, 0.005


def measure(report: harness.Report, options: harness.Options) -> None:
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    capacity_per_s = _MAX_BATCH_SIZE / (_A_S + _C_S * _MAX_BATCH_SIZE)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "objective_s": _ALLOW_S}
    report.settings["seconds"] = seconds
    rows = []
    for load in _LOADS:
        harness.say(f"{load:g} times capacity")
        trace = _run(load * capacity_per_s, seconds)
        goodput_per_s = len(trace.between(_WARM_UP_S, seconds)) / (seconds - _WARM_UP_S)
        report.add(f"{load:g}x capacity: goodput", "1/s", [goodput_per_s])
        if load > 1:
            reached = goodput_per_s / capacity_per_s
            report.goal(f"{load:g}x capacity: share of capacity lost", 1 - reached, round(1 - _GOODPUT, 3))
        late = trace.num_late / max(1, trace.num_offered)
        report.goal(f"{load:g}x capacity: late answers", late, _LATE)
        shown = [f"{load:g}", f"{goodput_per_s:.0f}", f"{goodput_per_s / capacity_per_s:.1%}"]
        shown += [f"{trace.num_refused}", f"{trace.num_late}", f"{trace.quantile_s(0.99) * 1e3:.1f}"]
        rows.append(shown)
    report.table(["offered / capacity", "goodput, 1/s", "of capacity", "refused", "late", "p99 of answers, ms"], rows)
    report.notes.append(
        f"Capacity is {capacity_per_s:.0f} requests/s: full batches without a pause. Late is what was run and was not "
        "answered in time, or was answered after its deadline."
    )


def _run(rate_per_s: float, seconds: float) -> Any:
    from orchestray.serving.batching import Adaptive
    from orchestray.serving.batching.simulation import Service, poisson, simulate

    return simulate(
        Adaptive(),
        Service(_A_S, _C_S),
        lambda run: run.open_loop(poisson(rate_per_s, random.Random(1)), seconds),
        max_batch_size=_MAX_BATCH_SIZE,
        warm_up_s=_WARM_UP_S,
        allow_s=_ALLOW_S,
    )


if __name__ == "__main__":
    harness.run("overload", "Goodput at and above capacity, with an objective of 100 ms for each request.", measure)

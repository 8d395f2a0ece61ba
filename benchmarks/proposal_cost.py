"""What a proposal costs after 5,000 trials, and what a search holds in memory: every method of hyper-parameters."""

from __future__ import annotations

import resource
import statistics
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
from harness import Options, Report, run, say

from orchestray.search.methods.base import Finished, Method
from orchestray.search.methods.base import Report as TrialReport
from orchestray.search.methods.registry import make_method
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform

SPACE: Mapping[str, Dimension] = {
    "lr": Uniform(1e-4, 1.0, is_log=True),
    "momentum": Uniform(0.0, 0.99),
    "decay": Uniform(1e-6, 1e-2, is_log=True),
    "width": Integer(8, 512, is_log=True),
    "depth": Integer(1, 8),
    "optimizer": Choice(("sgd", "adam", "rmsprop")),
}
BITS: Mapping[str, Dimension] = {f"b{bit}": Binary() for bit in range(20)}
METHODS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Dimension]]] = {
    "grid": ({"points": {"lr": 20, "momentum": 20, "decay": 20}}, SPACE),
    "random": ({}, SPACE),
    "random, sobol": ({"sequence": "sobol"}, SPACE),
    "bayesian": ({}, SPACE),
    "bayesian, tpe": ({"model": "tpe"}, SPACE),
    "asha": ({}, SPACE),
    "asha, bayesian": ({"proposals": {"type": "bayesian"}}, SPACE),
    "median_stopping": ({}, SPACE),
    "learning_curve": ({}, SPACE),
    "particle_swarm": ({}, SPACE),
    "spectral": ({}, BITS),
}
"""Each method with its parameters and a space it can search."""
_STEPS = 64


def score(changes: Mapping[str, Any], rng: np.random.Generator) -> float:
    """Something to learn from, with noise."""
    if "lr" not in changes:
        return float(sum(changes.values()) + rng.normal())
    distance = (np.log10(changes["lr"]) + 2) ** 2 + (changes["momentum"] - 0.9) ** 2 + (changes["depth"] - 4) ** 2 / 10
    return float(-distance + (changes["optimizer"] == "adam") + 0.1 * rng.normal())


def follow(method: Method, rng: np.random.Generator) -> float:
    """Run one trial from its proposal to its end; returns the seconds the proposal took."""
    began_s = time.perf_counter()
    proposal = method.ask()
    took_s = time.perf_counter() - began_s
    assert proposal is not None
    value, step = score(proposal.changes, rng), 0
    while step < _STEPS:
        step = min(method.next_report(proposal.trial, step), _STEPS)
        decision = method.report(TrialReport(proposal.trial, step, value * (1 - 1 / step)))
        ends = dict(method.released())
        for trial, what in ends.items():
            if trial != proposal.trial and type(what).__name__ == "Stop":
                method.tell(Finished(trial, "stopped", step, 0.0))
        decision = ends.get(proposal.trial, decision)
        if type(decision).__name__ == "Wait":
            return took_s  # held, and told when it is released
        if type(decision).__name__ == "Stop":
            method.tell(Finished(proposal.trial, "stopped", step, value))
            return took_s
    method.tell(Finished(proposal.trial, "succeeded", _STEPS, value))
    return took_s


def measure(report: Report, options: Options) -> None:
    finished, asked = (200, 10) if options.quick else (5000, 100)
    report.settings = {"finished_trials": finished, "proposals_timed": asked}
    rows = []
    for name, (parameters, space) in METHODS.items():
        say(name)
        kind = name.split(",")[0]
        method = make_method(
            kind, space=space, trials=finished + asked + 1, steps_per_trial=_STEPS, seed=0, **parameters
        )
        rng = np.random.default_rng(0)
        costs_s = [follow(method, rng) for _ in range(finished)]
        late_s = [follow(method, rng) for _ in range(asked)]
        tracemalloc.start()
        before_bytes = tracemalloc.get_traced_memory()[0]
        proposal = method.ask()
        kept_bytes, peak_bytes = (size - before_bytes for size in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        assert proposal is not None
        report.add(f"{name}: a proposal", "ms", [1e3 * cost for cost in late_s])
        report.goal(f"{name}: a proposal after {finished} trials", 1e3 * statistics.median(late_s), 50.0, "ms")
        report.goal(f"{name}: what a proposal leaves behind", kept_bytes / 1e3, 100.0, "kB")
        late_ms, largest_ms = 1e3 * statistics.median(late_s), 1e3 * max(late_s)
        first_ms = 1e3 * statistics.median(costs_s[len(costs_s) // 10 : len(costs_s) // 5])
        rows.append(
            [
                name,
                f"{first_ms:.2f}",
                f"{late_ms:.2f}",
                f"{largest_ms:.1f}",
                f"{peak_bytes / 1e6:.1f}",
            ]
        )
    header = ["method", f"ms at {finished // 7}", f"ms at {finished}", "the slowest of these", "MB while it is made"]
    report.table(header, rows)
    report.notes.append(f"Peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB.")


if __name__ == "__main__":
    run("proposal_cost", "What a proposal costs after 5,000 trials have ended, for every method.", measure)

"""What a proposal costs after 5,000 trials, and what a search holds in memory: every method there is."""

from __future__ import annotations

import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import Options, Report, run, say
from proposal_cases import CASES, STEPS, score

from orchestray.search.methods.base import Finished, Method
from orchestray.search.methods.base import Report as TrialReport
from orchestray.search.methods.registry import METHODS

Told = Callable[[], Mapping[str, Any]]
"""What a program of shared weights has found."""


@dataclass(frozen=True)
class Cost:
    """Of a trial, in seconds."""

    ask_s: float
    whole_s: float
    """With hearing of it: some methods think when a trial ends, not when they are asked."""


def follow(method: Method, rng: np.random.Generator, told: Told) -> Cost | None:
    """Run one trial from its proposal to its end; None if there is none."""
    began_s = time.perf_counter()
    proposal = method.ask()
    ask_s = time.perf_counter() - began_s
    if proposal is None:
        return None
    value, step, last = score(proposal.changes, rng), 0, proposal.steps or STEPS
    found = told() if proposal.program is not None else {}
    began_s = time.perf_counter()
    while step < last:
        step = min(max(method.next_report(proposal.trial, step), step + 1), last)
        decision = method.report(TrialReport(proposal.trial, step, value * (1 - 1 / step), told=found))
        ends = dict(method.released())
        for trial, what in ends.items():
            if trial != proposal.trial and type(what).__name__ == "Stop":
                method.tell(Finished(trial, "stopped", step, 0.0))
        decision = ends.get(proposal.trial, decision)
        if type(decision).__name__ == "Wait":
            return Cost(ask_s, ask_s + time.perf_counter() - began_s)  # held, and told when it is released
        if type(decision).__name__ == "Stop":
            break
    status = "succeeded" if step >= last else "stopped"
    method.tell(Finished(proposal.trial, status, step, value, told=found))
    return Cost(ask_s, ask_s + time.perf_counter() - began_s)


def measure(report: Report, options: Options) -> None:
    torch.set_num_threads(1)
    missing = set(METHODS) - {name.split(",")[0] for name in CASES}
    assert not missing, f"no case for {missing}"
    finished, asked = (40, 10) if options.quick else (5000, 100)
    report.settings = {"finished_trials": finished, "proposals_timed": asked}
    rows = []
    for name, case in CASES.items():
        say(name)
        method, architecture = case.make(name, finished + asked + 1)
        rng = np.random.default_rng(0)

        def told(architecture: Any = architecture, rng: np.random.Generator = rng) -> Mapping[str, Any]:
            return {"genomes": [architecture.sample(rng) for _ in range(finished + asked)]} if architecture else {}

        costs: list[Cost] = []
        while len(costs) < finished + asked and (cost := follow(method, rng, told)) is not None:
            costs.append(cost)
        late = costs[-asked:]
        kept_bytes, peak_bytes = _memory_of_a_proposal(method)
        late_ms = [1e3 * cost.ask_s for cost in late]
        report.add(f"{name}: a proposal", "ms", late_ms)
        report.goal(f"{name}: a proposal after {len(costs)} trials", statistics.median(late_ms), 50.0, "ms")
        mean_ms = 1e3 * statistics.mean(cost.whole_s for cost in late)
        report.goal(f"{name}: with hearing of its trial, on average", mean_ms, 50.0, "ms")
        report.goal(f"{name}: what a proposal leaves behind", kept_bytes / 1e3, 100.0, "kB")
        early_ms = 1e3 * statistics.median(cost.ask_s for cost in costs[: max(1, len(costs) // 5)])
        whole_s = sum(cost.whole_s for cost in costs)
        slowest_ms = 1e3 * max(cost.whole_s for cost in late)
        shown = [early_ms, statistics.median(late_ms), mean_ms, slowest_ms, whole_s, peak_bytes / 1e6]
        rows.append([name, str(len(costs)), *(f"{value:.2f}" for value in shown)])
    header = [
        "method",
        "trials",
        "ms, the first fifth",
        f"ms, the last {asked}",
        "ms of these with hearing",
        "ms of the slowest",
        "s of all trials (a resume)",
        "MB while it is made",
    ]
    report.table(header, rows)
    report.notes.append(f"Peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB.")
    report.notes.append("A method with fewer trials than that makes no more: one training finds it all, say.")


def _memory_of_a_proposal(method: Method) -> tuple[int, int]:
    """Bytes that a proposal leaves behind, and the most while it was made; 0 where there is none to be made."""
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    method.ask()
    kept_bytes, peak_bytes = (size - before_bytes for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    return kept_bytes, peak_bytes


if __name__ == "__main__":
    run("proposal_cost", "What a proposal costs after 5,000 trials have ended, for every method.", measure)

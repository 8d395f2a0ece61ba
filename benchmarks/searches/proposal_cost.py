"""Cost of a proposal after 5,000 trials, and memory that a search holds: every method there is."""

from __future__ import annotations

import gc
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.benchmark import Options, Report, run, say
from orchestray.search.methods.base import Decision, Exploit, Finished, Method, Pause, Stop
from orchestray.search.methods.base import Report as TrialReport
from orchestray.search.registry.methods import METHODS
from searches.proposal_cases import CASES, FINITE, STEPS, score

Told = Callable[[], Mapping[str, Any]]
"""A function that returns what a program of shared weights has found."""
_KEPT_KB = 20.0
"""Memory of a trial, so that a search of 5,000 holds 100 MB at most."""


@dataclass(frozen=True)
class Cost:
    """Cost of a trial, in seconds."""

    ask_s: float
    whole_s: float
    """With hearing of it: some methods think when a trial ends, not when they are asked."""


class Search:
    """Trials of a method, each run from its proposal to its end; one that was held goes on when it is released."""

    def __init__(self, method: Method, rng: np.random.Generator, told: Told) -> None:
        self._method, self._rng, self._told = method, rng, told
        self._live: dict[int, _Trial] = {}

    def follow(self) -> Cost | None:
        """Run one trial and those that it releases; None if there is none to run."""
        began_s = time.perf_counter()
        proposal = self._method.ask()
        ask_s = time.perf_counter() - began_s
        if proposal is None:
            return None
        value, found = score(proposal.changes, self._rng), self._told() if proposal.program is not None else {}
        self._live[proposal.trial] = _Trial(value, proposal.steps or STEPS, found)
        began_s = time.perf_counter()
        due = [proposal.trial]
        while due:
            due += self._go_on(due.pop())
        return Cost(ask_s, ask_s + time.perf_counter() - began_s)

    def _go_on(self, number: int) -> list[int]:
        """Train a trial until it ends or waits; returns others that are to go on."""
        trial, due = self._live[number], []
        while trial.step < trial.last:
            trial.step = min(max(self._method.next_report(number, trial.step), trial.step + 1), trial.last)
            value = trial.value * (1 - 1 / trial.step)
            decision = self._method.report(TrialReport(number, trial.step, value, told=trial.told))
            released = dict(self._method.released())
            decision = released.pop(number, decision)
            due += [other for other, what in released.items() if self._acts(other, what)]
            if isinstance(decision, Pause) or not self._acts(number, decision):
                return due
        self._end(number, "succeeded")
        return due

    def _acts(self, number: int, decision: Decision) -> bool:
        """Do as the method has decided; return True if the trial goes on."""
        trial = self._live[number]
        if isinstance(decision, Stop):
            self._end(number, "stopped")
            return False
        if isinstance(decision, Exploit):
            trial.step = self._live[decision.source].step
        return True

    def _end(self, number: int, status: str) -> None:
        trial = self._live.pop(number)
        self._method.tell(Finished(number, status, trial.step, trial.value, told=trial.told))


@dataclass
class _Trial:
    value: float
    last: int
    told: Mapping[str, Any]
    step: int = 0


def measure(report: Report, options: Options) -> None:
    torch.set_num_threads(1)
    missing = set(METHODS) - {name.split(",")[0] for name in CASES}
    assert not missing, f"no case for {missing}"
    finished, asked, traced = (40, 10, 20) if options.quick else (5000, 100, 1000)
    report.settings = {"finished_trials": finished, "proposals_timed": asked, "trials_traced": traced}
    rows, short = [], []
    for name, case in CASES.items():
        say(name)
        method, architecture = case.make(name, finished + asked + traced + 1)
        rng = np.random.default_rng(0)

        def told(architecture: Any = architecture, rng: np.random.Generator = rng) -> Mapping[str, Any]:
            num_found = finished + asked + traced
            return {"genomes": [architecture.sample(rng) for _ in range(num_found)]} if architecture else {}

        search = Search(method, rng, told)
        costs: list[Cost] = []
        while len(costs) < finished + asked and (cost := search.follow()) is not None:
            costs.append(cost)
        late = costs[-asked:]
        memory = _memory(search, traced)
        if memory.num_trials < traced and name not in FINITE:
            short.append(f"{name} ended after {len(costs) + memory.num_trials} trials")
        late_ms = [1e3 * cost.ask_s for cost in late]
        report.add(f"{name}: a proposal", "ms", late_ms)
        report.goal(f"{name}: a proposal after {len(costs)} trials", statistics.median(late_ms), 50.0, "ms")
        mean_ms = 1e3 * statistics.mean(cost.whole_s for cost in late)
        report.goal(f"{name}: with hearing of its trial, on average", mean_ms, 50.0, "ms")
        if memory.num_trials:
            kept_kb = memory.kept_bytes / 1e3 / memory.num_trials
            what = f"{name}: what a trial leaves behind, mean of the last {memory.num_trials}"
            report.goal(what, kept_kb, _KEPT_KB, "kB")
        early_ms = 1e3 * statistics.median(cost.ask_s for cost in costs[: max(1, len(costs) // 5)])
        whole_s = sum(cost.whole_s for cost in costs)
        slowest_ms = 1e3 * max(cost.whole_s for cost in late)
        shown = [early_ms, statistics.median(late_ms), mean_ms, slowest_ms, whole_s]
        kept = [f"{kept_kb:.2f}", f"{memory.peak_bytes / 1e6:.2f}"] if memory.num_trials else ["-", "-"]
        rows.append([name, str(len(costs) + memory.num_trials), *(f"{value:.2f}" for value in shown), *kept])
    header = [
        "method",
        "trials",
        "ms, the first fifth",
        f"ms, the last {asked}",
        "ms of these with hearing",
        "ms of the slowest",
        "s of all trials (a resume)",
        f"kB a trial leaves, of {traced} more",
        "MB at most meanwhile",
    ]
    report.table(header, rows)
    report.goal("methods that ended early", float(len(short)), 0.0)
    report.notes += short
    report.notes.append(f"Peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB.")
    report.notes += [
        f"{name} may have fewer trials, and then its memory is not traced: {what}." for name, what in FINITE.items()
    ]


@dataclass(frozen=True)
class Memory:
    """Memory of further trials."""

    num_trials: int
    kept_bytes: int
    """That all of them have left behind."""
    peak_bytes: int
    """The most while one was run."""


def _memory(search: Search, trials: int) -> Memory:
    """Measure what Python and numpy hold more after further trials, as many as there are up to `trials`.

    These are trials of their own, from proposal to end, after those whose time is taken: it is slow to trace memory.
    """
    num_trials = 0
    gc.collect()
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    while num_trials < trials and search.follow() is not None:
        num_trials += 1
    gc.collect()
    kept_bytes, peak_bytes = (size - before_bytes for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    return Memory(num_trials, kept_bytes, peak_bytes)


if __name__ == "__main__":
    run("proposal_cost", "What a proposal costs after 5,000 trials have ended, for every method.", measure)

"""A population of 32 on `digits`: `packed` (one batched program) against its members as trials of their own.

Two pairs. The first is the goal's, both sides in one process with one thread, without Ray: the same members, steps,
exploits and validations, so the ratio is that of the work of a core. The second is what a user sees on two cores:
`orchestray.search` of configs/search/digits-pbt-packed.yaml, and of the same with `packed: false` and `parallel: 2`,
whose members do not wait for each other, as is the default; each in an interpreter of its own. It is measured for
information.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import benchmark, machine
from orchestray.platform.actors.member import keep_freed_memory
from orchestray.search.methods.base import Exploit, Pause, Report
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.replay import config_at
from orchestray.search.spaces.dimensions import Dimension, Uniform
from orchestray.search.trials.packed import PackedPopulation
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config

_GOAL = 0.2
_TIMEOUT_S = 1200.0
_CONFIG = benchmark.REPOSITORY / "configs/search/digits-pbt-packed.yaml"
_UNPACKED = ("search.method.packed=false", "search.parallel=2")
_SPACE: dict[str, Dimension] = {
    "train.optimizer.lr": Uniform(1e-3, 1.0, is_log=True),
    "train.optimizer.momentum": Uniform(0.1, 0.95),
}


def config_of(steps: int) -> Any:
    train = {"batch_size": 64, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.5}}
    return load_train_config({"name": "population", "task": {"type": "digits"}, "train": train})


def method_of(population: int, steps: int, *, packed: bool) -> PopulationBasedTraining:
    return PopulationBasedTraining(
        space=_SPACE,
        population=population,
        interval_steps=max(1, steps // 4),
        steps_per_trial=steps,
        synchronous=True,
        packed=packed,
    )


def packed(population: int, steps: int) -> tuple[float, float]:
    """Train the members as one batch; return seconds, and the best member's accuracy."""
    began_s = time.perf_counter()
    proposal = method_of(population, steps, packed=True).ask()
    assert proposal is not None
    program = PackedPopulation(config_of(steps), **proposal.arguments)
    progress = program.advance(steps)
    return time.perf_counter() - began_s, progress.metrics["accuracy"]


def apart(population: int, steps: int) -> tuple[float, float]:
    """Train the members apart, with data and task read once for all; return seconds, and the best member's accuracy."""
    began_s = time.perf_counter()
    method, base, task_cache = method_of(population, steps, packed=False), config_of(steps), TaskCache()
    trials: dict[int, TrainingTrial] = {}
    while (proposal := method.ask()) is not None:
        trials[proposal.trial] = TrainingTrial(config_at(base, proposal.changes), task_cache=task_cache)
    at, best = 0, 0.0
    while at < steps:
        at = method.next_report(0, at)
        for number, trial in trials.items():
            accuracy = trial.advance(at).metrics["accuracy"]
            best = accuracy if number == 0 else max(best, accuracy)
            assert at >= steps or isinstance(method.report(Report(number, at, accuracy)), Pause)
        for number, decision in method.released() if at < steps else ():
            if isinstance(decision, Exploit):
                state = trials[decision.source].state()
                trials[number] = TrainingTrial(config_at(base, decision.changes), task_cache=task_cache)
                trials[number].load(state)
    return time.perf_counter() - began_s, best


def searched(place: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Return what searches/ours/population_search.py writes about a search that keeps its files in `place`."""
    place.mkdir()
    spec, out = place / "spec.json", place / "out.json"
    spec.write_text(json.dumps({"config": str(_CONFIG), "overrides": list(overrides)}), encoding="utf-8")
    command = [sys.executable, str(benchmark.FOLDER / "searches/ours/population_search.py"), str(spec), str(out)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise benchmark.BenchmarkError(f"{' '.join(command[1:2])} failed: {done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return told


def measure_searches(report: benchmark.Report, options: benchmark.Options, rounds: int) -> None:
    """Add the pair that a user would run."""
    short = ["search.method.population=4", "search.budget.trials=4", "search.budget.steps_per_trial=40"]
    short += ["search.method.interval_steps=10"]
    sides = {"packed: true": (), "packed: false, parallel: 2": _UNPACKED}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}

    def run(name: str) -> None:
        place = options.workspace / f"{'apart' if sides[name] else 'packed'}-{len(found[name])}"
        found[name].append(searched(place, [*sides[name], *(short if options.quick else [])]))

    benchmark.alternate({name: partial(run, name) for name in sides}, rounds, benchmark.say)
    calls, whole = [], []
    for name, told in found.items():
        calls.append([one["call_s"] for one in told])
        whole.append([one["start_s"] + one["call_s"] for one in told])
        report.add(f"orchestray.search, {name}: the call, Ray being there", "s", calls[-1])
        report.add(f"orchestray.search, {name}: with the start of Ray", "s", whole[-1])
        report.add(f"orchestray.search, {name}: steps of all members", "", [one["steps"] for one in told])
    report.compare("orchestray.search: packed / two members at once, the call", *calls)
    report.compare("orchestray.search: packed / two members at once, with the start of Ray", *whole)
    best = [told[-1]["best"] for told in found.values()]
    report.notes.append(f"accuracy of the best member of orchestray.search: packed {best[0]:.4f}, apart {best[1]:.4f}")
    report.settings["orchestray.search"] = {
        "rounds": rounds,
        "members": [told[-1]["trials"] for told in found.values()],
        "cores": machine.usable_cores(),
    }


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as every process of a search does
    rounds, population = options.rounds(3), 4 if options.quick else 32
    steps = 40 if options.quick else 200
    report.settings = {"rounds": rounds, "population": population, "steps": steps, "batch_size": 64, "threads": 1}
    found: dict[str, list[tuple[float, float]]] = {"packed": [], "apart": []}
    benchmark.alternate(
        {
            "packed": lambda: found["packed"].append(packed(population, steps)),
            "apart": lambda: found["apart"].append(apart(population, steps)),
        },
        rounds,
        benchmark.say,
    )
    seconds = {name: [value for value, _ in values] for name, values in found.items()}
    for name, values in seconds.items():
        report.add(name, "s", values)
    part = report.compare("packed / apart", seconds["packed"], seconds["apart"])
    report.goal("time of the packed population, of the trials apart", part, _GOAL, "x")
    best = {name: values[-1][1] for name, values in found.items()}
    report.notes.append(
        f"accuracy of the best member, in one process: packed {best['packed']:.4f}, apart {best['apart']:.4f}"
    )
    measure_searches(report, options, rounds)


if __name__ == "__main__":
    benchmark.run(
        "packed_population", "A population of 32 on digits as one batched program, against 32 trials", measure
    )

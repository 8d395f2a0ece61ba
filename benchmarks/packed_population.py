"""A population of 32 on `digits`: `packed` (one batched program) against its members as trials of their own.

Both in one process with one thread: the same members, steps, exploits and validations. So the ratio is that of the work
of a core; what two cores would halve for the trials apart, torch's threads can take off the batched program.
"""

from __future__ import annotations

import time
from typing import Any

import harness
import torch

from orchestray.platform.config.load import load_train_config
from orchestray.platform.gang.member import keep_freed_memory
from orchestray.search.methods.base import Become, Report, Wait
from orchestray.search.methods.population.training import PopulationBasedTraining
from orchestray.search.replay import config_at
from orchestray.search.spaces.dimensions import Dimension, Uniform
from orchestray.search.trials.packed import PackedPopulation
from orchestray.search.trials.shelf import Shelf
from orchestray.search.trials.training import TrainingTrial

_GOAL = 0.2
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
    """Seconds, and the best member's accuracy."""
    began_s = time.perf_counter()
    proposal = method_of(population, steps, packed=True).ask()
    assert proposal is not None
    program = PackedPopulation(config_of(steps), **proposal.arguments)
    progress = program.advance(steps)
    return time.perf_counter() - began_s, progress.metrics["accuracy"]


def apart(population: int, steps: int) -> tuple[float, float]:
    """Seconds, and the best member's accuracy; data and task are read once for all, as a process of a search does."""
    began_s = time.perf_counter()
    method, base, shelf = method_of(population, steps, packed=False), config_of(steps), Shelf()
    trials: dict[int, TrainingTrial] = {}
    while (proposal := method.ask()) is not None:
        trials[proposal.trial] = TrainingTrial(config_at(base, proposal.changes), shelf=shelf)
    at, best = 0, 0.0
    while at < steps:
        at = method.next_report(0, at)
        for number, trial in trials.items():
            accuracy = trial.advance(at).metrics["accuracy"]
            best = accuracy if number == 0 else max(best, accuracy)
            assert at >= steps or isinstance(method.report(Report(number, at, accuracy)), Wait)
        for number, decision in method.released() if at < steps else ():
            if isinstance(decision, Become):
                state = trials[decision.source].state()
                trials[number] = TrainingTrial(config_at(base, decision.changes), shelf=shelf)
                trials[number].load(state)
    return time.perf_counter() - began_s, best


def measure(report: harness.Report, options: harness.Options) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as every process of a search does
    rounds, population = options.rounds(3), 4 if options.quick else 32
    steps = 40 if options.quick else 200
    report.settings = {"rounds": rounds, "population": population, "steps": steps, "batch_size": 64, "threads": 1}
    found: dict[str, list[tuple[float, float]]] = {"packed": [], "apart": []}
    harness.alternate(
        {
            "packed": lambda: found["packed"].append(packed(population, steps)),
            "apart": lambda: found["apart"].append(apart(population, steps)),
        },
        rounds,
        harness.say,
    )
    seconds = {name: [value for value, _ in values] for name, values in found.items()}
    for name, values in seconds.items():
        report.add(name, "s", values)
    part = report.compare("packed / apart", seconds["packed"], seconds["apart"])
    report.goal("time of the packed population, of the trials apart", part, _GOAL, "x")
    best = {name: values[-1][1] for name, values in found.items()}
    report.notes.append(f"accuracy of the best member: packed {best['packed']:.4f}, apart {best['apart']:.4f}")


if __name__ == "__main__":
    harness.run("packed_population", "A population of 32 on digits as one batched program, against 32 trials", measure)

"""The minibatch size on digits: samples a second, accuracy after as many samples, steps and seconds to a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark, recorded
from harness.tuning import searched, step_ms, train
from orchestray.trainers.survey.convergence.batch_regions import StepTime, regions

_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
_SAMPLES = 10 * 1438
"""Ten passes over the training images."""
_TARGET, _TOLERANCE = 0.96, 0.01
_LEAST_STEPS = 200
_TRIALS = 12
_RATES = {"type": "log_uniform", "low": 0.003, "high": 1.0}
_CONFIG: dict[str, Any] = {
    "name": "batch",
    "task": {"type": "digits", "model": "cnn", "hidden": [16, 32]},
    "train": {"drop_last": True, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seeds, rounds, trials = options.rounds(3), options.rounds(3), 3 if options.quick else _TRIALS
    sizes = _SIZES[::3] if options.quick else _SIZES
    settings = {"sizes": sizes, "seeds": seeds, "trials": trials, "samples": _SAMPLES, "target": _TARGET}
    report.settings = {**settings, "rates": _RATES, "config": _CONFIG}
    found = recorded.trained(
        options.arguments.trained,
        report.settings,
        map(str, sizes),
        lambda size: _learned(int(size), seeds, trials, options.workspace),
    )
    taken: dict[int, list[float]] = {size: [] for size in sizes}

    def time_step(size: int) -> None:
        taken[size].append(step_ms(_config(size, 100), options.workspace))

    benchmark.alternate({f"{size}": partial(time_step, size) for size in sizes}, rounds, benchmark.say)
    _show(report, {size: found[str(size)] for size in sizes}, taken)


def _show(report: benchmark.Report, found: Mapping[int, Any], taken: Mapping[int, list[float]]) -> None:
    steps_s = {size: statistics.median(each) / 1e3 for size, each in taken.items()}
    time = StepTime.fitted(list(steps_s), list(steps_s.values()))
    off = max(abs(time.step_s(size) / each - 1) for size, each in steps_s.items())
    accuracies = {size: statistics.mean(each["accuracies"]) for size, each in found.items()}
    of_size = regions(accuracies, time, tolerance=_TOLERANCE)
    least = statistics.mean(found[min(found)]["steps"]) * min(found)
    rows, seconds = [], {}
    for size, each in found.items():
        report.add(f"{size}: step", "ms", taken[size])
        report.add(f"{size}: accuracy", "", each["accuracies"])
        report.add(f"{size}: steps to {_TARGET}", "steps", each["steps"])
        steps = statistics.mean(each["steps"])
        seconds[size] = steps * steps_s[size]
        rows.append(
            [
                *(f"{size:,}", f"{1e3 * steps_s[size]:.3g}", f"{size / steps_s[size]:,.0f}"),
                *(f"{each['rate']:.2g}", f"{100 * accuracies[size]:.1f} %", f"{each['rate_to_target']:.2g}"),
                *(f"{steps:.0f}", f"{least / (steps * size):.0%}", f"{seconds[size]:.2f}", of_size[size]),
            ]
        )
    header = ["batch", "step, ms", "samples/s", "rate", "accuracy", "rate to the target", "steps", "of perfect scaling"]
    report.table([*header, "seconds", "region"], rows)
    speeds = [size / each for size, each in steps_s.items()]
    report.goal("samples a second rise: the smallest batch / the largest", speeds[0] / speeds[-1], 0.5)
    report.goal("and saturate: the largest batch / the next", speeds[-1] / speeds[-2], 1.25)
    report.goal("accuracy falls: the largest batch / the best", accuracies[max(found)] / max(accuracies.values()), 0.98)
    quickest = min(seconds, key=seconds.__getitem__)
    report.notes += [
        (
            f"`accuracy` is that after {_SAMPLES:,} samples, ten passes over the images; `steps` and `seconds` are "
            f"those to a validation accuracy of {_TARGET}. Both are means over the seeds, each with the best of "
            f"{report.settings['trials']} rates, which `orchestray search` tried for that size and that purpose with "
            "another seed."
        ),
        (
            "Of perfect scaling: samples of the smallest batch to the target, over those of this one. The target is "
            f"reached in the least time with a batch of {quickest}."
        ),
        (
            f"A step takes {1e3 * time.fixed_s:.2g} ms and {1e6 * time.sample_s:.2g} us a sample, with an error of at "
            f"most {off:.0%}; half of the most samples a second are those of a batch of {time.half_speed_size:.0f}."
        ),
        (
            "Region A: fewer than half of the most samples a second. C: above the largest batch whose accuracy is "
            f"within {100 * _TOLERANCE:.0f} point of the best. B: neither."
        ),
    ]


def _config(size: int, steps: int, **more: Any) -> dict[str, Any]:
    return {**_CONFIG, "train": {**_CONFIG["train"], "batch_size": size, "steps": steps, **more}}


def _learned(size: int, seeds: int, trials: int, place: Path) -> dict[str, Any]:
    """Return accuracies and steps of each seed, with the best rate for each; seed 0 is that of the search."""
    space, num_steps = {"train.optimizer.lr": _RATES}, _SAMPLES // size
    whole = _config(size, num_steps, validate_every_steps=100_000)
    until = {"metric": "accuracy", "value": _TARGET}
    short = _config(size, max(num_steps, _LEAST_STEPS), validate_every_steps=max(1, 64 // size), until=until)
    tried = {"accuracy": searched(whole, space, "accuracy", trials, place)}
    tried["steps"] = searched(short, space, "accuracy", trials, place)
    rate = max(tried["accuracy"], key=lambda trial: trial["objective"])["config"]["train.optimizer.lr"]
    reached = [trial for trial in tried["steps"] if trial["objective"] >= _TARGET]
    if not reached:
        raise benchmark.BenchmarkError(f"no rate of {trials} came to {_TARGET} with a batch of {size}")
    quick = min(reached, key=lambda trial: (trial["steps"], -trial["objective"]))["config"]["train.optimizer.lr"]
    accuracies, steps = [], []
    for seed in range(1, seeds + 1):
        run = train(whole, {"train.seed": seed, "train.optimizer.lr": rate}, place)
        accuracies.append(run.result["final"]["validation"]["accuracy"])
        run = train(short, {"train.seed": seed, "train.optimizer.lr": quick}, place)
        if run.result["final"]["validation"]["accuracy"] < _TARGET:
            benchmark.say(f"a batch of {size} has not come to {_TARGET} with seed {seed}")
        steps.append(run.result["steps"])
    benchmark.say(f"batch {size}: rate {rate:.3g}, accuracies {accuracies}; rate {quick:.3g}, steps {steps}")
    return {"rate": rate, "rate_to_target": quick, "accuracies": accuracies, "steps": steps, "tried": tried}


if __name__ == "__main__":
    benchmark.run(
        "batch_sizes",
        "The minibatch size on digits: samples a second, accuracy, steps and seconds to a target, at its best rates.",
        measure,
        recorded.add_trained_option,
    )

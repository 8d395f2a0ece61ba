"""Optimizers on two tasks, each with its settings chosen by as many trials of a search: steps and seconds to a target.

K-FAC, Muon and SOAP are held against SGD and AdamW.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark, recorded
from harness.tuning import searched, step_ms, train


@dataclass(frozen=True)
class Task:
    """A training, and the validation metric to come to."""

    config: dict[str, Any]
    metric: str
    target: float
    loss: float
    """Training loss to come to, as a mean of steps."""
    mean_of: int

    def is_reached(self, value: float) -> bool:
        return value <= self.target if self.metric == "loss" else value >= self.target

    @property
    def steps(self) -> int:
        return int(self.config["train"]["steps"])


_TASKS = {
    "digits_cnn": Task(
        {
            "name": "digits",
            "task": {"type": "digits", "model": "cnn", "hidden": [16, 32]},
            "train": {"batch_size": 256, "steps": 100, "validate_every_steps": 1},
        },
        "accuracy",
        0.96,
        0.1,
        5,
    ),
    "python_source": Task(
        {
            "name": "source",
            "task": {"type": "python_source", "context": 64, "width": 64, "depth": 2, "heads": 4, "num_files": 20},
            "train": {
                "batch_size": 32,
                "steps": 150,
                "lr_schedule": {"type": "constant", "warmup_steps": 15},
                "grad_clip": 1.0,
                "validate_every_steps": 5,
            },
        },
        "loss",
        2.5,
        2.5,
        15,
    ),
}
_DIGITS, _SOURCE = _TASKS
_KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "sgd", "momentum": 0.9},
    "AdamW": {"type": "adamw", "betas": [0.9, 0.95]},
    "LAMB": {"type": "lamb", "betas": [0.9, 0.95]},
    "LARS": {"type": "lars"},
    "K-FAC": {"type": "kfac"},
    "Muon": {"type": "muon", "weight_decay": 0.01, "adamw": ["0.*", "4.weight", "9.weight"]},
    "SOAP": {"type": "soap"},
}
_RATES = {  # two and a half decades each
    "SGD": (0.01, 3.0),
    "AdamW": (3e-4, 0.1),
    "LAMB": (1e-3, 0.3),
    "LARS": (1.0, 300.0),
    "K-FAC": (0.01, 3.0),
    "Muon": (1e-3, 0.3),
    "SOAP": (3e-4, 0.1),
}
_BESIDE = {"K-FAC": {"damping": (1e-4, 0.1), "kl_clip": (1e-4, 0.1)}}
"""Keys that are searched beside the rate, in as many trials."""
_TRIALS = 8
_SPREAD = {"type": "kfac", "lr": 0.1, "damping": 0.003, "inverse_every_steps": 10, "statistics_every_steps": 10}
_TIMED_STEPS = 60


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seeds, rounds, trials = options.rounds(3), options.rounds(3), 2 if options.quick else _TRIALS
    spaces = {name: _space(name) for name in _KINDS}
    configs = {name: task.config for name, task in _TASKS.items()}
    report.settings = {"seeds": seeds, "trials": trials, **configs, "kinds": _KINDS, "spaces": spaces}
    place = options.workspace
    cells = {f"{name}, {kind}": (name, kind) for name in _TASKS for kind in _KINDS}
    kept = recorded.trained(
        options.arguments.trained,
        report.settings,
        cells,
        lambda cell: _learned(_TASKS[cells[cell][0]], cells[cell][1], seeds, trials, place),
    )
    found = {name: {kind: kept[f"{name}, {kind}"] for kind in _KINDS} for name in _TASKS}
    times = _times(found, rounds, place)
    for name, task in _TASKS.items():
        report.table([name, *_COLUMNS], _rows(report, name, task, found[name], times[name]))
    _hold(report, found, times)
    report.details = found
    report.notes += [
        f"{name}: `steps` and `seconds` are those to a validation {task.metric} of {task.target}, in at most "
        f"{task.steps} steps of {task.config['train']['batch_size']} samples; `last` is the {task.metric} after all of "
        f"them; `training` steps to a training loss of {task.loss}, a mean of {task.mean_of} steps. Means over {seeds} "
        "seeds, with the least and the most."
        for name, task in _TASKS.items()
    ]
    report.notes += [
        (
            f"Each optimizer has {trials} trials of `orchestray search` on each task with another seed, over a rate "
            "within two and a half decades; those of K-FAC choose `damping` and `kl_clip` as well, within three."
        ),
        (
            "`step` is the time of a step of one process over that of SGD; `state` the bytes of the optimizer's state "
            "in a checkpoint over those of the weights. K-FAC inverts its matrices every ten steps, and measures them "
            "in each; a step of two workers measures every ten steps as well."
        ),
        "Muon and SOAP treat matrices: on digits_cnn convolutions move by AdamW, and with Muon the last layer too.",
    ]


# -- trainings ---------------------------------------------------------------------------------------------------------


def _space(kind: str) -> dict[str, dict[str, Any]]:
    ranges = {"lr": _RATES[kind], **_BESIDE.get(kind, {})}
    return {
        f"train.optimizer.{key}": {"type": "log_uniform", "low": low, "high": high}
        for key, (low, high) in ranges.items()
    }


def _config(task: Task, kind: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**task.config, "train": {**task.config["train"], "optimizer": dict(kind), **more}}


def _learned(task: Task, kind: str, seeds: int, trials: int, place: Path) -> dict[str, Any]:
    """Return the values that the search chose, and the whole trainings with them, of each seed."""
    section = {**_KINDS[kind], "lr": _RATES[kind][0]}
    until = {"metric": task.metric, "value": task.target}
    tried = searched(_config(task, section, until=until), _space(kind), task.metric, trials, place)
    chosen = min(tried, key=partial(_rank, task))["config"]
    benchmark.say(f"{task.config['name']}, {kind}: {chosen}")
    runs = []
    for seed in range(1, seeds + 1):
        run = train(_config(task, section), {"train.seed": seed, **chosen}, place)
        lines = run.metrics().to_pylist()
        runs.append(
            {
                "losses": [line["loss"] for line in lines if line.get("split") is None],
                "validation": [[line["step"], line[task.metric]] for line in lines if line.get("split") is not None],
                "state": _state(run.path),
            }
        )
    return {"chosen": chosen, "tried": tried, "runs": runs}


def _rank(task: Task, trial: Mapping[str, Any]) -> tuple[float, float]:
    """Return the steps to the target, and what orders those that need as many, or do not come to it."""
    value = float(trial["objective"])
    better = value if task.metric == "loss" else -value
    return (float(trial["steps"]) if task.is_reached(value) else float("inf"), better)


def _state(run: Path) -> float:
    """Return the bytes of the optimizer's state over those of the weights, in the last checkpoint."""
    last = max((run / "checkpoints").iterdir())
    return (last / "optimizer.safetensors").stat().st_size / (last / "model.safetensors").stat().st_size


def _times(found: Mapping[str, Mapping[str, Any]], rounds: int, place: Path) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of a step of each optimizer on each task, and of two workers (`two`), in turns."""
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in _KINDS} for name in _TASKS}
    taken["two"] = {"SGD": [], "K-FAC": []}

    def time_step(name: str, kind: str, config: dict[str, Any]) -> None:
        taken[name][kind].append(step_ms(config, place))

    sides = {}
    for name, task in _TASKS.items():
        for kind, section in _KINDS.items():
            chosen = {key.rpartition(".")[2]: value for key, value in found[name][kind]["chosen"].items()}
            config = _config(task, {**section, **chosen}, steps=_TIMED_STEPS)
            sides[f"{name}, {kind}"] = partial(time_step, name, kind, config)
    for kind, chosen in (("SGD", {**_KINDS["SGD"], "lr": 0.1}), ("K-FAC", _SPREAD)):
        config = {**_config(_TASKS[_DIGITS], chosen, steps=_TIMED_STEPS + 20), "strategy": {"network": {"data": 2}}}
        sides[f"two workers, {kind}"] = partial(time_step, "two", kind, config)
    benchmark.alternate(sides, rounds, benchmark.say)
    return taken


# -- the result --------------------------------------------------------------------------------------------------------

_COLUMNS = ("chosen", "training", "steps", "step", "seconds", "last", "state")


def _rows(
    report: benchmark.Report, name: str, task: Task, found: Mapping[str, Any], times: Mapping[str, Sequence[float]]
) -> list[list[str]]:
    rows = []
    of_sgd = statistics.median(times["SGD"])
    for kind, each in found.items():
        steps = [_steps_to_target(task, run["validation"]) for run in each["runs"]]
        last = statistics.mean(run["validation"][-1][1] for run in each["runs"])
        step_ms_ = statistics.median(times[kind])
        report.add(f"{name}, {kind}: step", "ms", times[kind])
        report.add(f"{name}, {kind}: last {task.metric}", "", [run["validation"][-1][1] for run in each["runs"]])
        losses = [_steps_to_loss(run["losses"], task.loss, task.mean_of) for run in each["runs"]]
        shown, mean = _shown(steps, task)
        if mean is not None:
            report.add(f"{name}, {kind}: steps to {task.target}", "steps", [float(step or 0) for step in steps])
        seconds = "-" if mean is None else f"{mean * step_ms_ / 1e3:.2f}"
        chosen = ", ".join(f"{key.rpartition('.')[2]} {value:.2g}" for key, value in each["chosen"].items())
        shown_last = f"{last:.2f}" if task.metric == "loss" else f"{100 * last:.1f} %"
        state = f"{each['runs'][0]['state']:.1f} x"
        step = f"{step_ms_ / of_sgd:.2f} x"
        rows.append([kind, chosen, _shown(losses, task)[0], shown, step, seconds, shown_last, state])
    return rows


def _shown(steps: Sequence[int | None], task: Task) -> tuple[str, float | None]:
    """Return steps as a text, and their mean; None if a seed does not come there."""
    reached = [step for step in steps if step is not None]
    if len(reached) < len(steps):
        return f"> {task.steps}" + (f" ({len(reached)} of {len(steps)} get there)" if reached else ""), None
    mean = statistics.mean(reached)
    return f"{mean:.0f} ({min(reached)} to {max(reached)})", mean


def _hold(report: benchmark.Report, found: Mapping[str, Mapping[str, Any]], times: Mapping[str, Any]) -> None:
    """Hold K-FAC against SGD, and Muon and SOAP against AdamW, seed by seed."""
    digits, source = ({kind: each["runs"] for kind, each in found[name].items()} for name in _TASKS)
    goal, most = _TASKS[_DIGITS], _TASKS[_DIGITS].steps + 1
    steps = {
        kind: [float(_steps_to_loss(run["losses"], goal.loss, goal.mean_of) or most) for run in digits[kind]]
        for kind in ("SGD", "K-FAC")
    }
    for kind, each in steps.items():
        report.add(f"digits_cnn, steps to a training loss of {goal.loss}: {kind}", "steps", each)
    ratio = report.compare("K-FAC / SGD, steps", steps["K-FAC"], steps["SGD"])
    report.goal(f"digits_cnn, steps to a training loss of {goal.loss}: K-FAC / SGD", ratio, 0.6)
    adamw, mean_of = [run["losses"] for run in source["AdamW"]], _TASKS[_SOURCE].mean_of
    for kind in ("Muon", "SOAP"):
        pairs = zip((run["losses"] for run in source[kind]), adamw, strict=True)
        needed = [float(_steps_to_loss(ours, _last(peer), mean_of) or len(peer) + 1) for ours, peer in pairs]
        report.add(f"python_source, steps to AdamW's last training loss: {kind}", "steps", needed)
        ratio = report.compare(f"{kind} / AdamW, steps", needed, [float(len(losses)) for losses in adamw])
        report.goal(f"python_source, steps to AdamW's last training loss: {kind} / AdamW", ratio, 0.7)
    for kind, each in times["two"].items():
        report.add(f"a step of two workers: {kind}", "ms", each)
    ratio = report.compare("K-FAC / SGD, time of a step of two workers", times["two"]["K-FAC"], times["two"]["SGD"])
    report.goal("time of a step of two workers, inverses every 10 steps: K-FAC / SGD", ratio, 1.25)


def _steps_to_target(task: Task, validation: Sequence[Sequence[float]]) -> int | None:
    return next((int(step) for step, value in validation if task.is_reached(value)), None)


def _steps_to_loss(losses: Sequence[float], target: float, mean_of: int) -> int | None:
    ends = range(mean_of, len(losses) + 1)
    return next((end for end in ends if statistics.mean(losses[end - mean_of : end]) <= target), None)


def _last(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-_TASKS[_SOURCE].mean_of :])


if __name__ == "__main__":
    benchmark.run(
        "second_order",
        "Steps, seconds and state of optimizers on two tasks; second-order methods against SGD and AdamW.",
        measure,
        recorded.add_trained_option,
    )

"""Predicted against measured steps, over every scheme that the planner compares.

Each model is planned first and trained after, by every plan, in three rounds. A step takes the median of them, since
one run differs from the next by some percent, and now and then by a third. A run is held out from what corrects its
prediction: the record has all other runs, or those of the other models alone (a first plan).

Of 30 schemes the fastest by their measurements is one that was lucky. So the plans that are chosen and the three that
were fastest are trained again, in turn, before they are compared. One plan is chosen by its prediction alone, and one
of the three with the best predictions by the three rounds, as `orchestray plan --try 3` does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import benchmark, commands
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.engines.driver import HOST
from orchestray.trainers.loop.loop import MOST_STEPS
from orchestray.trainers.machine import calibrate, kept
from orchestray.trainers.planning.candidates import Candidate, candidates
from orchestray.trainers.planning.cluster import Cluster
from orchestray.trainers.planning.measuring import Measurements
from orchestray.trainers.planning.planner import Plans
from orchestray.trainers.planning.plans import Plan
from orchestray.trainers.planning.predict import Predictor
from orchestray.trainers.planning.record import Entry, Record, measured_step_s

_TASKS = benchmark.FOLDER / "harness" / "tasks.py"
_MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "task": {"type": f"{_TASKS}:Mlp", "widths": [512, 1024, 1024, 512]},
        "train": {"batch_size": 256, "drop_last": True, "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9}},
    },
    "cnn": {
        "task": {"type": "digits", "model": "cnn", "hidden": [32, 64]},
        "train": {"batch_size": 256, "drop_last": True, "optimizer": {"type": "adam", "lr": 0.001}},
    },
    "transformer": {
        "task": {"type": "python_source", "context": 64, "width": 96, "depth": 4, "heads": 4},
        "train": {"batch_size": 32, "drop_last": True, "optimizer": {"type": "adamw", "lr": 0.001}},
    },
}
_WORKERS = 2
_TRAINED_S, _LEAST_STEPS, _MOST_STEPS = 3.0, 40, 400
_ROUNDS, _FINAL_ROUNDS = 3, 5
_FINALISTS, _TRIED = 3, 3
_PIPELINES = ("4 micro-batches", "8 micro-batches")
_BY_VALUES = "topk"
"""The scheme whose messages are coded, so that their sizes depend on the values of the gradients."""
_IN_OWN_PROCESSES = (
    "one process",
    "2 replicas",
    "2 replicas, ZeRO-3",
    "pipeline 2, 1f1b, 4 micro-batches",
    "2 workers, synchronous server",
)
_FOUR: dict[str, Any] = {
    "2 x pipeline 2, 1f1b": {"data": 2, "pipeline": 2, "microbatches": 8},
    "2 x pipeline 2, zbv": {"data": 2, "pipeline": 2, "schedule": "zbv", "microbatches": 8},
    "2 x pipeline 2, pipedream": {"data": 2, "pipeline": 2, "schedule": "pipedream", "microbatches": 8},
    "tensor 2 x pipeline 2, 1f1b": {"tensor": 2, "pipeline": 2, "microbatches": 8},
    "2 x tensor 2, auto": {"data": 2, "tensor": 2},
    "pipeline 4, 1f1b": {"pipeline": 4, "microbatches": 8},
}
"""Layouts of four workers: two cores have no time for them, but they send what they send."""
_TIMEOUT_S = 120.0


@dataclass
class Case:
    """A scheme of a model, predicted and measured."""

    model: str
    plan: Plan
    times_s: list[float] = field(default_factory=list)
    """Seconds of a step in each round."""
    result: dict[str, Any] = field(default_factory=dict)
    """Result of the last round."""
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that all workers sent in a run, by its number of steps."""
    final_times_s: list[float] = field(default_factory=list)
    """Seconds of a step in each round of the finalists."""
    predicted_s: float = 0.0
    """Predicted step, corrected by all other runs."""
    resident_bytes: int = 0
    """Resident set of the worker with most, in a run of processes of its own; 0: not measured."""

    @property
    def measured_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.times_s)

    @property
    def step_bytes(self) -> float | None:
        """Bytes of a step: the difference of two runs, as begin and end send as well; None: there is one run."""
        if len(self.sent_bytes) < 2:
            return None
        few, many = min(self.sent_bytes), max(self.sent_bytes)
        return (self.sent_bytes[many] - self.sent_bytes[few]) / (many - few)

    def num_steps(self, number: int) -> int:
        """Return the steps of a round: in each some more, of which all kinds of steps are the same part."""
        settings = ReplicaSettings.from_config(
            load_train_config(dict(self.plan.config)), storage="", model_directory=""
        )
        period = int(settings.exchange.get("every") or 1)
        if settings.diverges or settings.is_streaming:  # workers agree after 16 steps, and at the end of an epoch
            period = math.lcm(period, min(self.plan.steps_per_epoch or MOST_STEPS, MOST_STEPS))
        steps = min(_MOST_STEPS, max(_LEAST_STEPS, _TRAINED_S / self.plan.step_s))
        return period * (math.ceil(steps / period) + number)


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    # The user's record keeps out of it.
    os.environ["XDG_CACHE_HOME"] = str(options.workspace / "cache")
    _say("calibrate")
    machine = calibrate.calibrate(HOST, options.workspace)
    measurements = Measurements(None, kept.versions(), kept.cores())
    predictor = Predictor(Cluster(machine), measurements)
    report.settings = {"workers": _WORKERS, "models": list(options.arguments.models)}
    cases: list[Case] = []
    for name in options.arguments.models:
        cases += _of_model(name, predictor, options)
    of_four = _of_four_workers(predictor, options)
    report.settings["schemes"] = len(cases)
    report.settings["disturbed_measurements"] = measurements.num_disturbed
    _judge(report, cases, options)
    _judge_bytes(report, [*cases, *of_four])


def _of_model(name: str, predictor: Predictor, options: benchmark.Options) -> list[Case]:
    config = load_train_config({**_MODELS[name], "train": {**_MODELS[name]["train"], "steps": _MOST_STEPS}})
    chosen = [each for each in candidates(config, _WORKERS, kept.cores()) if _is_chosen(each[0])]
    plans = []
    for candidate, applied in chosen[:3] if options.quick else chosen:
        try:
            plans.append(predictor.predict(applied, candidate.name, candidate.changes))
        except OrchestrayError as error:
            _say(f"{name}: {candidate.name} does not fit: {str(error)[:100]}")
    cases = [Case(name, plan) for plan in plans]
    for number in range(options.rounds(_ROUNDS, 1)):
        for place, case in enumerate(cases):
            _say(f"{name}: {case.plan.name}, round {number + 1}")
            case.times_s.append(_train(case, case.num_steps(number), options.workspace / f"{name}-{place}-{number}"))
            case.sent_bytes[case.result["steps"]] = case.result["bytes"]["sent"]
    for place, case in enumerate(cases):
        if case.plan.name in _IN_OWN_PROCESSES:
            case.resident_bytes = _resident_bytes(case.plan, options.workspace / f"{name}-{place}-memory")
    return cases


def _of_four_workers(predictor: Predictor, options: benchmark.Options) -> list[Case]:
    """Return layouts of four workers of a model with batch normalisation, each trained for two lengths."""
    name, cases = "cnn", list[Case]()
    for kind, network in [*_FOUR.items()][: 1 if options.quick else None]:
        data = {**_MODELS[name], "strategy": {"network": network}, "resources": {"cpus_per_worker": 0.5}}
        config = load_train_config({**data, "train": {**data["train"], "steps": _MOST_STEPS}})
        cases.append(case := Case(name, predictor.predict(config, kind, {"strategy.network": network})))
        for number in range(2):
            _say(f"{name}: {kind}, length {number + 1}")
            _train(case, case.num_steps(number), options.workspace / f"four-{len(cases)}-{number}")
            case.sent_bytes[case.result["steps"]] = case.result["bytes"]["sent"]
    return cases


def _say(text: str) -> None:
    print(text, flush=True)


def _is_chosen(candidate: Candidate) -> bool:
    """Return False for pipelines of other numbers of micro-batches, which are many and alike, and for rare averages."""
    if candidate.name.endswith("every 100"):  # as many steps as a run here makes
        return False
    return "micro-batches" not in candidate.name or candidate.name.endswith(_PIPELINES)


def _resident_bytes(plan: Plan, place: Path) -> int:
    """Return the resident set of a run by the command: processes that have trained before keep memory of that."""
    config = json.loads(json.dumps(dict(plan.config)))
    config["train"] |= {"epochs": None, "steps": _LEAST_STEPS, "validate_every_steps": 10 * _LEAST_STEPS}
    place.mkdir()
    told = commands.write_json(place / "config.yaml", {**config, "name": "run"})
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    result = json.loads((place / "run" / "result.json").read_text(encoding="utf-8"))
    return int(max(result["memory"]["peak_bytes"]))


def _train(case: Case, steps: int, place: Path) -> float:
    """Train by the plan of a case; return the seconds of a step, and keep the result."""
    import orchestray

    config = json.loads(json.dumps(dict(case.plan.config)))
    config["train"] |= {"epochs": None, "steps": steps, "validate_every_steps": 10 * steps}
    config["checkpoint"]["every_steps"] = 10 * steps
    run = orchestray.train(config, runs_dir=place, name="run")
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured_s = measured_step_s(lines)
    if measured_s is None:
        raise benchmark.BenchmarkError(f"{case.plan.name} made too few steps")
    case.result = dict(run.result)
    return measured_s


def _judge(report: benchmark.Report, cases: Sequence[Case], options: benchmark.Options) -> None:
    rows = []
    kinds: dict[str, Errors] = {
        "as predicted": Errors(),
        "corrected by other models": Errors(),
        "corrected by all other runs": Errors(),
    }
    for case in cases:
        raw, new, known = kinds.values()
        raw.add(case, case.plan)
        new.add(case, _corrected(case, [other for other in cases if other.model != case.model]))
        corrected = _corrected(case, [other for other in cases if other is not case])
        known.add(case, corrected)
        case.predicted_s = corrected.step_s
        rows.append(
            [
                case.model, case.plan.name, f"{1e3 * case.plan.step_s:.1f}", f"{1e3 * case.predicted_s:.1f}",
                f"{1e3 * case.measured_s:.1f}", f"{known.relative[-1]:+.1%}",
                f"{case.plan.memory.resident / 1e6:.0f}",
                f"{case.resident_bytes / 1e6:.0f}" if case.resident_bytes else "-",
            ]
        )  # fmt: skip
    report.table(["model", "scheme", "predicted, ms", "corrected, ms", "measured, ms", "error", "MB", "measured"], rows)
    for name, errors in kinds.items():
        report.add(f"error {name}", "%", errors.sizes)
        report.notes.append(f"{name[0].upper()}{name[1:]}: {errors.text}.")
    known = kinds["corrected by all other runs"]
    report.goal("step time: median error", statistics.median(known.sizes), 5.0, "%")
    report.goal("step time: 90th percentile of the errors", known.most_of(0.9), 12.0, "%")
    report.goal("step time: largest error", known.sizes[-1], 25.0, "%")
    report.goal("80 % interval: distance of its coverage from 80 %", abs(known.covered - 80.0), 5.0, "%")
    tau = _kendalls_tau([case.predicted_s for case in cases], [case.measured_s for case in cases])
    report.goal("all runs: 1 - Kendall's tau", 1 - tau, 0.1)
    for model in dict.fromkeys(case.model for case in cases):
        _judge_order(report, model, [case for case in cases if case.model == model], options)
    _judge_memory(report, cases)


@dataclass
class Errors:
    """Relative errors of predictions, and how many runs were within their intervals."""

    relative: list[float] = field(default_factory=list)
    num_inside: int = 0
    num_intervals: int = 0

    def add(self, case: Case, plan: Plan) -> None:
        """Add the error of a plan of a case."""
        self.relative.append(plan.step_s / case.measured_s - 1)
        if plan.interval_s is not None:
            self.num_intervals += 1
            self.num_inside += plan.interval_s[0] <= case.measured_s <= plan.interval_s[1]

    @property
    def sizes(self) -> list[float]:
        """Sizes of the errors in percent, the smallest first."""
        return sorted(100 * abs(each) for each in self.relative)

    def most_of(self, part: float) -> float:
        """Return the error in percent that a part of the predictions does not exceed."""
        return self.sizes[math.ceil(part * len(self.relative)) - 1]

    @property
    def covered(self) -> float:
        """Percentage of the runs that were within their 80 % intervals."""
        return 100 * self.num_inside / max(1, self.num_intervals)

    @property
    def text(self) -> str:
        """Median, 90th percentile and largest error, and what the intervals covered."""
        middle, most, largest = statistics.median(self.sizes), self.most_of(0.9), self.sizes[-1]
        covered = f"; the 80 % interval held for {self.covered:.0f} % of the runs" if self.num_intervals else ""
        return f"median error {middle:.1f} %, 90th percentile {most:.1f} %, largest {largest:.0f} %{covered}"


def _corrected(case: Case, known: Sequence[Case]) -> Plan:
    """Return the plan of a case as a record of these runs corrects it."""
    return case.plan.corrected(Record([_entry(other) for other in known]).correction(case.plan.traits))


def _kendalls_tau(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Return the part of the pairs of runs whose order is as predicted, less that of the others."""
    agreed = [
        math.copysign(1, (predicted_s[a] - predicted_s[b]) * (measured_s[a] - measured_s[b]))
        for a, b in itertools.combinations(range(len(predicted_s)), 2)
    ]
    return statistics.fmean(agreed) if agreed else 1.0


def _judge_order(report: benchmark.Report, model: str, cases: Sequence[Case], options: benchmark.Options) -> None:
    measured_s = [case.measured_s for case in cases]
    tau = _kendalls_tau([case.predicted_s for case in cases], measured_s)
    report.goal(f"{model}: 1 - Kendall's tau", 1 - tau, 0.1)
    rounds = list(zip(*(case.times_s for case in cases), strict=True))
    if len(rounds) > 1:
        report.notes.append(
            f"{model}: Kendall's tau of the first round and the last is {_kendalls_tau(rounds[0], rounds[-1]):.2f}."
        )
    exact = sorted((case for case in cases if case.plan.keeps_result), key=lambda case: case.measured_s)
    predicted = sorted(exact, key=lambda case: case.predicted_s)
    chosen, of_tried = predicted[0], _best_of_tried(predicted[:_TRIED])
    finalists = [*dict.fromkeys([chosen.plan.name, of_tried.plan.name])]
    finalists += [case.plan.name for case in exact if case.plan.name not in finalists][:_FINALISTS]
    again = {case.plan.name: case for case in exact if case.plan.name in finalists}
    for number, case in itertools.product(range(options.rounds(_FINAL_ROUNDS, 1)), again.values()):
        _say(f"{model}: {case.plan.name}, again {number + 1}")
        place = options.workspace / f"{model}-final-{finalists.index(case.plan.name)}-{number}"
        case.final_times_s.append(_train(case, case.num_steps(0), place))
    finals_s = {name: statistics.median(again[name].final_times_s) for name in finalists}
    for kind, case in (("chosen plan", chosen), ("chosen of three tried", of_tried)):
        times = finals_s[case.plan.name] / min(finals_s.values())
        report.goal(f"{model}: {kind} / the best of the list", times, 1.03)
    told = ", ".join(f"{name} {1e3 * final_s:.1f} ms" for name, final_s in finals_s.items())
    choices = f"{chosen.plan.name} by its prediction, {of_tried.plan.name} of three that were tried"
    report.notes.append(f"{model}: chosen {choices}; they and the fastest once more: {told}.")


def _best_of_tried(cases: Sequence[Case]) -> Case:
    """Return the case that `orchestray plan --try` takes: its rounds are trainings in turn, as these were."""
    best = Plans(tuple(replace(case.plan, tried_s=case.measured_s) for case in cases)).best
    assert best is not None, "each keeps the result"
    return next(case for case in cases if case.plan.name == best.name)


def _judge_memory(report: benchmark.Report, cases: Sequence[Case]) -> None:
    activations, resident = [], []
    for case in cases:
        memory, found = case.plan.memory, case.result["memory"]
        kept_bytes = max(found.get("peak_activation_bytes") or [0])
        if kept_bytes:
            activations.append(abs(memory.activations / kept_bytes - 1))
        if case.resident_bytes:
            resident.append(abs(memory.resident / case.resident_bytes - 1))
    report.goal("activations: largest error", 100 * max(activations, default=0.0), 2.0, "%")
    report.goal("resident set: largest error", 100 * max(resident, default=0.0), 8.0, "%")


def _judge_bytes(report: benchmark.Report, cases: Sequence[Case]) -> None:
    sent, by_values = list[float](), list[float]()
    for case in cases:
        planned, found = sum(case.plan.num_bytes.values()), case.step_bytes
        if found is not None:
            rounding = len(case.plan.num_bytes) / 2  # a plan has whole bytes for each link
            beside = max(0.0, abs(planned - found) - rounding)
            error = beside / found if found else float(planned > 0)
            (by_values if case.plan.name.endswith(_BY_VALUES) else sent).append(error)
    report.goal("bytes of a step, of messages of fixed sizes: largest error", 100 * max(sent, default=0.0), 0.001, "%")
    report.add("error of the bytes of a step", "%", sorted(100 * error for error in sent) or [0.0])
    if by_values:
        report.add(f"error of the bytes of a step, {_BY_VALUES}", "%", sorted(100 * error for error in by_values))


def _entry(case: Case) -> Entry:
    traits = case.plan.traits
    return Entry(traits.family, case.model, case.plan.step_s, case.measured_s, "", "here", traits.scheme, traits.task)


if __name__ == "__main__":
    benchmark.run("planner", "Predicted against measured steps of every scheme", measure, add_options)
